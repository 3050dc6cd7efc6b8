// NSNumber, NSData, NSURL and NSError.
#import <Foundation/Foundation.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

@implementation NSNumber {
  enum class Kind { kBool, kSigned, kUnsigned, kReal } _kind;
  long long _integer;  // also holds the bits of an unsigned value
  double _real;
}

+ (NSNumber*)integer:(long long)value kind:(Kind)kind {
  NSNumber* number = [[self alloc] init];
  number->_kind = kind;
  number->_integer = value;
  number->_real = kind == Kind::kUnsigned ? static_cast<double>(static_cast<unsigned long long>(value))
                                          : static_cast<double>(value);
  return number;
}

+ (NSNumber*)numberWithBool:(BOOL)value {
  return [self integer:value kind:Kind::kBool];
}
+ (NSNumber*)numberWithChar:(char)value {
  return [self integer:value kind:Kind::kSigned];
}
+ (NSNumber*)numberWithInt:(int)value {
  return [self integer:value kind:Kind::kSigned];
}
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)value {
  return [self integer:value kind:Kind::kUnsigned];
}
+ (NSNumber*)numberWithLong:(long)value {
  return [self integer:value kind:Kind::kSigned];
}
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value {
  return [self integer:static_cast<long long>(value) kind:Kind::kUnsigned];
}
+ (NSNumber*)numberWithLongLong:(long long)value {
  return [self integer:value kind:Kind::kSigned];
}
+ (NSNumber*)numberWithUnsignedLongLong:(unsigned long long)value {
  return [self integer:static_cast<long long>(value) kind:Kind::kUnsigned];
}
+ (NSNumber*)numberWithInteger:(NSInteger)value {
  return [self integer:value kind:Kind::kSigned];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value {
  return [self integer:static_cast<long long>(value) kind:Kind::kUnsigned];
}
+ (NSNumber*)numberWithFloat:(float)value {
  return [self numberWithDouble:value];
}
+ (NSNumber*)numberWithDouble:(double)value {
  NSNumber* number = [[self alloc] init];
  number->_kind = Kind::kReal;
  number->_integer = static_cast<long long>(value);
  number->_real = value;
  return number;
}

- (BOOL)boolValue {
  return _integer != 0 || _real != 0;
}
- (int)intValue {
  return static_cast<int>(_integer);
}
- (unsigned int)unsignedIntValue {
  return static_cast<unsigned int>(_integer);
}
- (long)longValue {
  return _integer;
}
- (long long)longLongValue {
  return _integer;
}
- (unsigned long long)unsignedLongLongValue {
  return static_cast<unsigned long long>(_integer);
}
- (NSInteger)integerValue {
  return _integer;
}
- (NSUInteger)unsignedIntegerValue {
  return static_cast<NSUInteger>(_integer);
}
- (float)floatValue {
  return static_cast<float>(_real);
}
- (double)doubleValue {
  return _real;
}
- (NSString*)stringValue {
  switch (_kind) {
    case Kind::kReal:
      return [NSString stringWithFormat:@"%.17g", _real];
    case Kind::kUnsigned:
      return [NSString stringWithFormat:@"%llu", self.unsignedLongLongValue];
    default:
      return [NSString stringWithFormat:@"%lld", _integer];
  }
}
- (NSString*)description {
  return self.stringValue;
}
- (BOOL)isEqual:(id)other {
  if (![other isKindOfClass:[NSNumber class]]) return NO;
  NSNumber* number = other;
  return _kind == Kind::kReal || number->_kind == Kind::kReal ? _real == number->_real
                                                              : _integer == number->_integer;
}
- (NSUInteger)hash {
  return static_cast<NSUInteger>(_integer);
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end

@implementation NSData {
  std::vector<char> _bytes;
}
+ (instancetype)data {
  return [[self alloc] init];
}
+ (instancetype)dataWithBytes:(const void*)bytes length:(NSUInteger)length {
  return [[self alloc] initWithBytes:bytes length:length];
}
+ (instancetype)dataWithContentsOfFile:(NSString*)path {
  std::ifstream file(path.UTF8String, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return file ? [[self alloc] initWithBytes:bytes.data() length:bytes.size()] : nil;
}
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length {
  if ((self = [super init]) && length > 0) {
    const auto* first = static_cast<const char*>(bytes);
    _bytes.assign(first, first + length);
  }
  return self;
}
- (NSUInteger)length {
  return _bytes.size();
}
- (const void*)bytes {
  return _bytes.data();
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end

@implementation NSURL {
  NSString* _path;
}
+ (NSURL*)fileURLWithPath:(NSString*)path {
  NSURL* url = [[self alloc] init];
  url->_path = [NSString stringWithUTF8String:std::filesystem::absolute(path.UTF8String).c_str()];
  return url;
}
- (NSString*)path {
  return _path;
}
- (NSString*)absoluteString {
  return [@"file://" stringByAppendingString:_path];
}
- (BOOL)isFileURL {
  return YES;
}
- (NSString*)description {
  return self.absoluteString;
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end

NSErrorDomain const NSCocoaErrorDomain = @"NSCocoaErrorDomain";
NSErrorDomain const NSPOSIXErrorDomain = @"NSPOSIXErrorDomain";
NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";
NSErrorUserInfoKey const NSUnderlyingErrorKey = @"NSUnderlyingError";

@implementation NSError {
  NSErrorDomain _domain;
  NSInteger _code;
  NSDictionary<NSErrorUserInfoKey, id>* _userInfo;
}
@synthesize domain = _domain, code = _code, userInfo = _userInfo;

+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary<NSErrorUserInfoKey, id>*)info {
  return [[self alloc] initWithDomain:domain code:code userInfo:info];
}
- (instancetype)initWithDomain:(NSErrorDomain)domain
                          code:(NSInteger)code
                      userInfo:(NSDictionary<NSErrorUserInfoKey, id>*)info {
  if ((self = [super init])) {
    _domain = [domain copy];
    _code = code;
    _userInfo = info ? [info copy] : [NSDictionary dictionary];
  }
  return self;
}
- (NSString*)localizedDescription {
  NSString* text = _userInfo[NSLocalizedDescriptionKey];
  return text ? text
              : [NSString
                    stringWithFormat:@"The operation couldn’t be completed. (%@ error %ld.)", _domain, _code];
}
- (NSString*)description {
  return [NSString
      stringWithFormat:@"Error Domain=%@ Code=%ld \"%@\"", _domain, _code, self.localizedDescription];
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end
