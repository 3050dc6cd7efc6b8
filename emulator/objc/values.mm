// NSURL and NSError.
#import <Foundation/Foundation.h>

#include <filesystem>
#include <string>

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
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@implementation NSError {
  NSErrorDomain _domain;
  NSInteger _code;
  NSString* _localizedDescription;
}
@synthesize domain = _domain, code = _code, localizedDescription = _localizedDescription;

+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary<NSErrorUserInfoKey, id>*)info {
  NSError* error = [[self alloc] init];
  error->_domain = [domain copy];
  error->_code = code;
  error->_localizedDescription = [info[NSLocalizedDescriptionKey] copy];
  return error;
}
- (NSString*)description {
  const std::string text = std::string("Error Domain=") + _domain.UTF8String +
                           " Code=" + std::to_string(_code) + " \"" +
                           (_localizedDescription ? _localizedDescription.UTF8String : "") + "\"";
  return [NSString stringWithUTF8String:text.c_str()];
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
@end
