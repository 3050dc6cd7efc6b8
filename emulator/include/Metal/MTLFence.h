// Fences, which order encoders that use the same untracked resources.
#pragma once

#import <Foundation/Foundation.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLFence <NSObject>
@end

NS_ASSUME_NONNULL_END
