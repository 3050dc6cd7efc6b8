// NSString. Every method except -UTF8String uses its result, so that literals, which the compiler lays out
// itself, need to implement only that one.
#import <Foundation/Foundation.h>

#include <stdexcept>
#include <string>

#include "abi.h"

@implementation NSString {
  std::string _text;
}

- (const char*)UTF8String {
  return _text.c_str();
}
+ (instancetype)stringWithUTF8String:(const char*)text {
  NSString* string = [[self alloc] init];
  string->_text = text;
  return string;
}

- (id)copyWithZone:(NSZone*)zone {
  return self;
}
- (NSString*)description {
  return self;
}
@end

// Literals: static data with this layout, ASCII or UTF-16.
@interface NSConstantString : NSString
@end

@implementation NSConstantString
- (const char*)UTF8String {
  struct Literal {
    void* isa;
    std::uint32_t flags, length, size, hash;
    const void* data;
  };
  const auto* literal = reinterpret_cast<const Literal*>((__bridge void*)self);
  constexpr std::uint32_t kEncodingMask = 3, kUtf16 = 2;
  if ((literal->flags & kEncodingMask) == kUtf16) throw std::logic_error("a literal that is not ASCII");
  return static_cast<const char*>(literal->data);
}
@end

// Literals of up to 8 ASCII characters, encoded in the pointer: 7 bits each from the top, and the length
// above the 3-bit tag.
@interface NSTinyString : NSString
@end

@implementation NSTinyString
- (const char*)UTF8String {
  const auto bits = reinterpret_cast<std::uintptr_t>((__bridge void*)self);
  std::string text;
  for (unsigned i = 0; i < ((bits >> 3) & 31); i++) text += static_cast<char>((bits >> (57 - 7 * i)) & 127);
  return metal_emulator::objc::intern(text);
}
@end
