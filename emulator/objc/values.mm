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
  return self;
}
@end

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@implementation NSError {
  NSInteger _code;
  NSString* _localizedDescription;
}
@synthesize code = _code, localizedDescription = _localizedDescription;

+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary<NSErrorUserInfoKey, id>*)info {
  NSError* error = [[self alloc] init];
  error->_code = code;
  error->_localizedDescription = [info[NSLocalizedDescriptionKey] copy];
  return error;
}
@end
