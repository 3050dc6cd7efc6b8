// Properties of the Objective-C runtime that no test of the Metal classes depends on. Each check throws if
// its property does not hold.
#include "metal_objects.h"

#include <atomic>

@interface Tracked : NSObject
@property(nonatomic, strong) NSObject* partner;
@end

namespace {

std::atomic<int> alive{0};

}  // namespace

@implementation Tracked
- (instancetype)init {
  if ((self = [super init])) alive++;
  return self;
}
- (void)dealloc {
  alive--;
}
@end

namespace metal_testing {
namespace {

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__)

void properties_retain() {
  @autoreleasepool {
    Tracked* object = [Tracked new];
    Tracked* partner = [Tracked new];
    object.partner = partner;
    partner = nil;
    EXPECT(alive == 2);
    object.partner = nil;
    EXPECT(alive == 1);
  }
  EXPECT(alive == 0);
}

void blocks_retain_captures() {
  int (^block)() = nil;
  @autoreleasepool {
    Tracked* captured = [Tracked new];
    block = ^{
      return captured ? 1 : 0;
    };
  }
  EXPECT(alive == 1 && block() == 1);
  block = nil;
  EXPECT(alive == 0);
}

void strings() {
  EXPECT([@"a longer literal" isEqual:to_ns("a longer literal")] && [@"short" isEqual:to_ns("short")]);
  EXPECT(to_string(@"short") == "short" && ![@"a" isEqual:@"b"] && ![@"a" isEqual:@[]]);
  EXPECT([@"same" hash] == [to_ns("same") hash]);
}

void enumeration() {
  NSMutableArray<NSString*>* array = [NSMutableArray array];
  for (int i = 0; i < 1000; i++) [array addObject:to_ns(std::to_string(i))];
  long sum = 0;
  for (NSString* number in array) sum += std::stol(to_string(number));
  EXPECT(sum == 999 * 500);
}

}  // namespace

void bind_objc_checks(nb::module_& m) {
  m.def(
      "check_objc",
      [] {
        for (const auto check : {properties_retain, blocks_retain_captures, strings, enumeration}) check();
      },
      kPool);
}

}  // namespace metal_testing
