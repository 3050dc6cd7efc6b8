// NSString. Every method except -UTF8String and -length uses the bytes of -UTF8String, so literals, which the
// compiler lays out itself, need only those two.
#import <Foundation/Foundation.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "abi.h"

namespace {

std::string_view view(NSString* string) {
  return string.UTF8String;
}

NSUInteger utf16_length(std::string_view utf8) {
  NSUInteger units = 0;
  for (unsigned char byte : utf8) units += (byte & 0xc0) == 0x80 ? 0 : byte >= 0xf0 ? 2 : 1;
  return units;
}

void append_utf8(std::string& to, char32_t c) {
  if (c < 0x80) {
    to += static_cast<char>(c);
  } else if (c < 0x800) {
    to += {static_cast<char>(0xc0 | (c >> 6)), static_cast<char>(0x80 | (c & 63))};
  } else if (c < 0x10000) {
    to += {static_cast<char>(0xe0 | (c >> 12)), static_cast<char>(0x80 | ((c >> 6) & 63)),
           static_cast<char>(0x80 | (c & 63))};
  } else {
    to += {static_cast<char>(0xf0 | (c >> 18)), static_cast<char>(0x80 | ((c >> 12) & 63)),
           static_cast<char>(0x80 | ((c >> 6) & 63)), static_cast<char>(0x80 | (c & 63))};
  }
}

std::string from_utf16(const char16_t* units, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; i++) {
    char32_t c = units[i];
    if (c >= 0xd800 && c < 0xdc00 && i + 1 < count)
      c = 0x10000 + ((c - 0xd800) << 10) + (units[++i] - 0xdc00);
    append_utf8(text, c);
  }
  return text;
}

template <typename T>
void append_formatted(std::string& to, const std::string& specification, T value) {
  char buffer[512];
  const int size = std::snprintf(buffer, sizeof buffer, specification.c_str(), value);
  if (size < static_cast<int>(sizeof buffer)) {
    to.append(buffer, static_cast<std::size_t>(size));
  } else {
    std::string large(static_cast<std::size_t>(size) + 1, '\0');
    std::snprintf(large.data(), large.size(), specification.c_str(), value);
    to.append(large.data(), static_cast<std::size_t>(size));
  }
}

// printf with %@.
std::string format_arguments(std::string_view format, va_list arguments) {
  std::string text;
  for (std::size_t i = 0; i < format.size(); i++) {
    if (format[i] != '%') {
      text += format[i];
      continue;
    }
    std::string specification = "%";
    int longs = 0;
    char conversion = 0;
    while (++i < format.size() && !conversion) {
      const char c = format[i];
      if (c == '*') {
        specification += std::to_string(va_arg(arguments, int));
      } else if (c == 'l' || c == 'z' || c == 't' || c == 'q' || c == 'j') {
        longs++;
      } else if (c != 'h') {
        specification += c;
        if (!std::strchr("0123456789.+-# '", c)) conversion = c;
      }
    }
    i--;
    const bool integer = conversion && std::strchr("diuxXoc", conversion);
    if (conversion == '%') {
      text += '%';
    } else if (conversion == '@') {
      id object = va_arg(arguments, id);
      text += object ? [object description].UTF8String : "(null)";
    } else if (conversion == 's') {
      const char* string = va_arg(arguments, const char*);
      append_formatted(text, specification, string ? string : "(null)");
    } else if (conversion == 'p') {
      append_formatted(text, specification, va_arg(arguments, void*));
    } else if (integer && longs > 0) {
      append_formatted(text, specification.insert(specification.size() - 1, "l"), va_arg(arguments, long));
    } else if (integer) {
      append_formatted(text, specification, va_arg(arguments, int));
    } else if (conversion) {
      append_formatted(text, specification, va_arg(arguments, double));
    }
  }
  return text;
}

}  // namespace

@implementation NSString {
  std::string _text;
}

- (const char*)UTF8String {
  return _text.c_str();
}
- (NSUInteger)length {
  return utf16_length(view(self));
}

+ (instancetype)string {
  return [[self alloc] init];
}
+ (instancetype)stringWithString:(NSString*)string {
  return [[self alloc] initWithString:string];
}
+ (instancetype)stringWithUTF8String:(const char*)text {
  return [[self alloc] initWithUTF8String:text];
}
+ (instancetype)stringWithFormat:(NSString*)format, ... {
  va_list arguments;
  va_start(arguments, format);
  NSString* string = [[self alloc] initWithFormat:format arguments:arguments];
  va_end(arguments);
  return string;
}
+ (instancetype)stringWithContentsOfFile:(NSString*)path
                                encoding:(NSStringEncoding)encoding
                                   error:(NSError**)error {
  std::ifstream file(path.UTF8String, std::ios::binary);
  std::ostringstream contents;
  contents << file.rdbuf();
  if (!file) {
    if (error) {
      NSString* message = [NSString stringWithFormat:@"The file “%@” could not be read.", path];
      *error = [NSError errorWithDomain:NSCocoaErrorDomain
                                   code:260  // NSFileReadNoSuchFileError
                               userInfo:@{NSLocalizedDescriptionKey : message}];
    }
    return nil;
  }
  const std::string text = contents.str();
  return [[self alloc] initWithBytes:text.data() length:text.size() encoding:encoding];
}

- (instancetype)initWithString:(NSString*)string {
  return [self initWithUTF8String:string.UTF8String];
}
- (instancetype)initWithUTF8String:(const char*)text {
  if ((self = [super init])) _text = text;
  return self;
}
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding {
  if (encoding != NSASCIIStringEncoding && encoding != NSUTF8StringEncoding) return nil;
  if ((self = [super init])) _text.assign(static_cast<const char*>(bytes), length);
  return self;
}
- (instancetype)initWithFormat:(NSString*)format, ... {
  va_list arguments;
  va_start(arguments, format);
  self = [self initWithFormat:format arguments:arguments];
  va_end(arguments);
  return self;
}
- (instancetype)initWithFormat:(NSString*)format arguments:(va_list)arguments {
  if ((self = [super init])) _text = format_arguments(view(format), arguments);
  return self;
}

- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return self;
}
- (NSUInteger)lengthOfBytesUsingEncoding:(NSStringEncoding)encoding {
  static_cast<void>(encoding);
  return view(self).size();
}
- (BOOL)isEqualToString:(NSString*)other {
  return view(self) == view(other);
}
- (BOOL)isEqual:(id)other {
  return self == other || ([other isKindOfClass:[NSString class]] && [self isEqualToString:other]);
}
- (NSUInteger)hash {
  return std::hash<std::string_view>{}(view(self));
}
- (BOOL)hasPrefix:(NSString*)other {
  return view(self).starts_with(view(other));
}
- (BOOL)hasSuffix:(NSString*)other {
  return view(self).ends_with(view(other));
}
- (BOOL)containsString:(NSString*)other {
  return view(self).find(view(other)) != std::string_view::npos;
}
- (NSString*)stringByAppendingString:(NSString*)other {
  return [NSString stringWithFormat:@"%@%@", self, other];
}
- (NSData*)dataUsingEncoding:(NSStringEncoding)encoding {
  static_cast<void>(encoding);
  return [NSData dataWithBytes:self.UTF8String length:view(self).size()];
}
- (NSString*)description {
  return self;
}
@end

// Literals: static data of this layout, ASCII or UTF-16.
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
  if ((literal->flags & kEncodingMask) != kUtf16) return static_cast<const char*>(literal->data);
  return metal_emulator::objc::intern(
      from_utf16(static_cast<const char16_t*>(literal->data), literal->length));
}
@end

// Literals of up to 8 ASCII characters: 7 bits each from the top of the pointer, the length above the 3-bit
// tag.
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

void NSLog(NSString* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "%s\n", format_arguments(view(format), arguments).c_str());
  va_end(arguments);
}
