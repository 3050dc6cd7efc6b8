// Properties of Objective-C and Foundation that programs rely on. Each is a function that throws if it does
// not hold.
#include "metal_objects.h"

#include <atomic>
#include <thread>
#include <vector>

// Counts its instances. Its members have constructors and destructors that must run.
@interface Tracked : NSObject
@property(nonatomic, copy) NSString* name;
@property(nonatomic, strong) NSObject* partner;
+ (int)alive;
- (std::vector<int>&)numbers;
@end

@interface TrackedMore : Tracked
@end

@interface Tracked (Category)
- (NSString*)greeting;
@end

namespace {

std::atomic<int> alive{0};

struct MemberWithConstructor {
  std::vector<int> numbers = {1, 2, 3};
};

}  // namespace

@implementation Tracked {
  MemberWithConstructor _member;
}
- (instancetype)init {
  if ((self = [super init])) alive++;
  return self;
}
- (void)dealloc {
  alive--;
}
+ (int)alive {
  return alive;
}
- (std::vector<int>&)numbers {
  return _member.numbers;
}
@end

@implementation TrackedMore {
  char _padding;
  std::string _text;
}
- (instancetype)init {
  if ((self = [super init])) _text = "more";
  return self;
}
- (NSString*)description {
  return metal_testing::to_ns(_text + " " + self.name.UTF8String);
}
@end

@implementation Tracked (Category)
- (NSString*)greeting {
  return metal_testing::to_ns(std::string("hello ") + self.name.UTF8String);
}
@end

namespace metal_testing {
namespace {

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__)

void reference_counts() {
  Tracked* outer = nil;
  {
    Tracked* inner = [[Tracked alloc] init];
    outer = inner;
    EXPECT(Tracked.alive == 1);
  }
  EXPECT(Tracked.alive == 1);
  outer = nil;
  EXPECT(Tracked.alive == 0);
}

void members_of_superclasses() {
  TrackedMore* object = [TrackedMore new];
  EXPECT(object.numbers.size() == 3);
  object.numbers.push_back(4);
  object.name = @"x";
  EXPECT([object.description isEqual:@"more x"]);
  EXPECT([object isKindOfClass:[Tracked class]] && ![object isKindOfClass:[NSString class]]);
}

void categories_and_messages_to_nil() {
  Tracked* object = [Tracked new];
  object.name = @"you";
  EXPECT([object.greeting isEqual:@"hello you"]);
  EXPECT([object respondsToSelector:@selector(greeting)]);
  EXPECT(![object respondsToSelector:@selector(addObject:)]);
  object = nil;
  EXPECT(object.greeting == nil);
  EXPECT(object.name.UTF8String == nullptr);
}

void autorelease_pools() {
  __unsafe_unretained Tracked* borrowed = nil;
  @autoreleasepool {
    NSArray<Tracked*>* array = @[ [Tracked new] ];
    borrowed = array.firstObject;
    EXPECT(Tracked.alive == 1);
    static_cast<void>(borrowed);
  }
  EXPECT(Tracked.alive == 0);
}

void exceptions_release_what_they_leave() {
  const auto thrower = [] {
    const AutoreleasePool pool;
    Tracked* local = [Tracked new];
    NSArray* array = @[ local ];
    static_cast<void>(array[0]);
    throw std::runtime_error("out of Objective-C++");
  };
  bool caught = false;
  try {
    thrower();
  } catch (const std::runtime_error& error) {
    caught = std::string(error.what()) == "out of Objective-C++";
  }
  EXPECT(caught);
  EXPECT(Tracked.alive == 0);
}

void blocks_keep_what_they_capture() {
  int (^block)(int) = nil;
  {
    const AutoreleasePool pool;
    Tracked* captured = [Tracked new];
    block = ^(int step) {
      captured.numbers.push_back(step);
      return int(captured.numbers.size());
    };
  }
  EXPECT(Tracked.alive == 1);
  EXPECT(block(1) == 4 && block(2) == 5);
  NSArray* array = @[ block ];
  EXPECT(array.count == 1);
  array = nil;
  block = nil;
}

void properties() {
  @autoreleasepool {
    Tracked* object = [Tracked new];
    Tracked* partner = [Tracked new];
    object.partner = partner;
    partner = nil;
    EXPECT(Tracked.alive == 2 && object.partner != nil);
    object.partner = nil;
  }
  EXPECT(Tracked.alive == 0);
}

void strings() {
  NSString* literal = @"a longer literal";
  EXPECT([literal isEqual:[NSString stringWithUTF8String:"a longer literal"]]);
  EXPECT(std::string(@"short".UTF8String) == "short");
  EXPECT(![@"a" isEqual:@[]]);
  EXPECT([@"same" hash] == [[NSString stringWithUTF8String:"same"] hash]);
}

void collections() {
  NSArray<NSString*>* array = @[ @"one", @"two", @"three and more" ];
  std::string joined;
  for (NSString* item in array) joined += to_string(item);
  EXPECT(joined == "onetwothree and more");
  EXPECT([array[2] isEqual:@"three and more"] && [array.firstObject isEqual:array[0]]);
  NSDictionary<NSString*, NSString*>* values = @{@"a" : @"1", @"a longer key" : @"2"};
  EXPECT([values[@"a"] isEqual:@"1"] && [values[@"a longer key"] isEqual:@"2"]);
  EXPECT(values[@"none"] == nil && values.count == 2);
  std::size_t keys = 0;
  for (NSString* key in values) keys += to_string(key).size();
  EXPECT(keys == 1 + 12);
  NSMutableDictionary* changed = [NSMutableDictionary dictionary];
  changed[@"k"] = array;
  changed[@"k"] = @"other";
  EXPECT([changed[@"k"] isEqual:@"other"] && changed.count == 1);
}

void enumeration_of_many_objects() {
  NSMutableArray<NSString*>* array = [NSMutableArray array];
  for (int i = 0; i < 1000; i++) [array addObject:to_ns(std::to_string(i))];
  long sum = 0;
  for (NSString* number in array) sum += std::stol(to_string(number));
  EXPECT(sum == 999 * 500);
}

void urls_and_errors() {
  NSURL* url = [NSURL fileURLWithPath:@"/tmp/x.metallib"];
  EXPECT([url.path isEqual:@"/tmp/x.metallib"]);
  NSError* error = [NSError errorWithDomain:@"D" code:7 userInfo:@{NSLocalizedDescriptionKey : @"words"}];
  EXPECT([error.localizedDescription isEqual:@"words"] && error.code == 7);
}

void pools_belong_to_threads() {
  @autoreleasepool {
    std::thread([] {
      const AutoreleasePool pool;
      @[ [Tracked new] ];
    }).join();
    EXPECT(Tracked.alive == 0);
  }
}

}  // namespace

// Functions by name, each of which raises RuntimeError with the condition that does not hold.
void bind_objc_checks(nb::module_& m) {
  nb::dict checks;
  const auto add = [&](const char* name, void (*check)()) {
    checks[name] = nb::cpp_function(
        [check] {
          const AutoreleasePool pool;
          check();
        },
        nb::call_guard<nb::gil_scoped_release>());
  };
  add("reference counts", reference_counts);
  add("members of superclasses", members_of_superclasses);
  add("categories and messages to nil", categories_and_messages_to_nil);
  add("autorelease pools", autorelease_pools);
  add("exceptions release what they leave", exceptions_release_what_they_leave);
  add("URLs and errors", urls_and_errors);
  add("blocks keep what they capture", blocks_keep_what_they_capture);
  add("properties", properties);
  add("strings", strings);
  add("collections", collections);
  add("enumeration of many objects", enumeration_of_many_objects);
  add("pools belong to threads", pools_belong_to_threads);
  m.attr("objc_checks") = checks;
}

}  // namespace metal_testing
