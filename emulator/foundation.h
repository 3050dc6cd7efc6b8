// Parts of Foundation that Objective-C++ with exceptions needs. Also for programs on a Mac.
#pragma once

#import <Foundation/Foundation.h>

#include <string>

extern "C" {
void* objc_autoreleasePoolPush();
void objc_autoreleasePoolPop(void* pool);
}

namespace metal_emulator {

// Unlike @autoreleasepool, it is also drained when an exception leaves its scope.
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_(objc_autoreleasePoolPush()) {}
  ~AutoreleasePool() { objc_autoreleasePoolPop(pool_); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  void* pool_;
};

inline NSString* to_ns(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}
inline std::string to_string(NSString* text) {
  return text ? text.UTF8String : "";
}

}  // namespace metal_emulator
