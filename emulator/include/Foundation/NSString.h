#pragma once

#import <Foundation/NSObject.h>

NS_ASSUME_NONNULL_BEGIN

@interface NSString : NSObject <NSCopying>
- (nullable const char*)UTF8String NS_RETURNS_INNER_POINTER;
+ (nullable instancetype)stringWithUTF8String:(const char*)nullTerminatedCString;
@end

NS_ASSUME_NONNULL_END
