// NSArray and NSDictionary over standard containers.
#import <Foundation/Foundation.h>

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Hash {
  std::size_t operator()(id key) const { return [key hash]; }
};
struct Equal {
  bool operator()(id a, id b) const { return [a isEqual:b]; }
};

// Writes up to `capacity` of `items` from the enumeration's position into `buffer`.
template <typename Items>
NSUInteger enumerate(const Items& items, NSFastEnumerationState* state, id __unsafe_unretained* buffer,
                     NSUInteger capacity) {
  static unsigned long unchanged = 0;
  state->itemsPtr = buffer;
  state->mutationsPtr = &unchanged;
  NSUInteger count = 0;
  while (count < capacity && state->state < items.size()) buffer[count++] = items[state->state++];
  return count;
}

}  // namespace

@implementation NSArray {
 @protected
  std::vector<id> _items;
}

+ (instancetype)array {
  return [[self alloc] init];
}
+ (instancetype)arrayWithObject:(id)object {
  return [[self alloc] initWithObjects:&object count:1];
}
+ (instancetype)arrayWithObjects:(const id[])objects count:(NSUInteger)count {
  return [[self alloc] initWithObjects:objects count:count];
}
- (instancetype)initWithObjects:(const id[])objects count:(NSUInteger)count {
  if ((self = [super init])) {
    for (NSUInteger i = 0; i < count; i++) {
      if (!objects[i]) throw std::invalid_argument("NSArray: object " + std::to_string(i) + " is nil");
      _items.push_back(objects[i]);
    }
  }
  return self;
}

- (NSUInteger)count {
  return _items.size();
}
- (id)objectAtIndex:(NSUInteger)index {
  if (index >= _items.size()) {
    throw std::out_of_range("NSArray: index " + std::to_string(index) + " of " +
                            std::to_string(_items.size()));
  }
  return _items[index];
}
- (id)objectAtIndexedSubscript:(NSUInteger)index {
  return [self objectAtIndex:index];
}
- (id)firstObject {
  return _items.empty() ? nil : _items.front();
}
- (id)lastObject {
  return _items.empty() ? nil : _items.back();
}
- (BOOL)containsObject:(id)object {
  return [self indexOfObject:object] != NSNotFound;
}
- (NSUInteger)indexOfObject:(id)object {
  for (std::size_t i = 0; i < _items.size(); i++) {
    if ([_items[i] isEqual:object]) return i;
  }
  return NSNotFound;
}
- (NSArray*)arrayByAddingObject:(id)object {
  NSMutableArray* array = [[NSMutableArray alloc] initWithObjects:_items.data() count:_items.size()];
  [array addObject:object];
  return array;
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  return [[NSArray alloc] initWithObjects:_items.data() count:_items.size()];
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)capacity {
  return enumerate(_items, state, buffer, capacity);
}
- (BOOL)isEqual:(id)other {
  if (self == other) return YES;
  if (![other isKindOfClass:[NSArray class]] || [other count] != _items.size()) return NO;
  for (std::size_t i = 0; i < _items.size(); i++) {
    if (![_items[i] isEqual:[other objectAtIndex:i]]) return NO;
  }
  return YES;
}
- (NSUInteger)hash {
  return _items.size();
}
- (NSString*)description {
  std::string text = "(";
  for (id item : _items) {
    if (text.size() > 1) text += ", ";
    text += [item description].UTF8String;
  }
  return [NSString stringWithUTF8String:(text + ")").c_str()];
}
@end

@implementation NSMutableArray
- (void)addObject:(id)object {
  if (!object) throw std::invalid_argument("NSMutableArray: addObject: nil");
  _items.push_back(object);
}
- (void)removeAllObjects {
  _items.clear();
}
@end

@implementation NSDictionary {
 @protected
  std::unordered_map<id, id, Hash, Equal> _values;
}

+ (instancetype)dictionary {
  return [[self alloc] init];
}
+ (instancetype)dictionaryWithObject:(id)object forKey:(id<NSCopying>)key {
  return [[self alloc] initWithObjects:&object forKeys:&key count:1];
}
+ (instancetype)dictionaryWithObjects:(const id[])objects
                              forKeys:(const id<NSCopying>[])keys
                                count:(NSUInteger)count {
  return [[self alloc] initWithObjects:objects forKeys:keys count:count];
}
- (instancetype)initWithObjects:(const id[])objects
                        forKeys:(const id<NSCopying>[])keys
                          count:(NSUInteger)count {
  if ((self = [super init])) {
    for (NSUInteger i = 0; i < count; i++) {
      if (!objects[i] || !keys[i]) {
        throw std::invalid_argument("NSDictionary: key or object " + std::to_string(i) + " is nil");
      }
      _values[[(id)keys[i] copy]] = objects[i];
    }
  }
  return self;
}

- (NSUInteger)count {
  return _values.size();
}
- (NSArray*)allKeys {
  NSMutableArray* keys = [NSMutableArray array];
  for (const auto& [key, value] : _values) [keys addObject:key];
  return keys;
}
- (id)objectForKey:(id)key {
  const auto found = _values.find(key);
  return found == _values.end() ? nil : found->second;
}
- (id)objectForKeyedSubscript:(id)key {
  return [self objectForKey:key];
}
- (id)copyWithZone:(NSZone*)zone {
  static_cast<void>(zone);
  NSMutableDictionary* copy = [NSMutableDictionary dictionary];
  for (const auto& [key, value] : _values) [copy setObject:value forKey:key];
  return copy;
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)capacity {
  std::vector<id __unsafe_unretained> keys;
  for (const auto& [key, value] : _values) keys.push_back(key);
  return enumerate(keys, state, buffer, capacity);
}
- (NSString*)description {
  std::string text = "{";
  for (const auto& [key, value] : _values) {
    text += std::string(" ") + [key description].UTF8String + " = " + [value description].UTF8String + ";";
  }
  return [NSString stringWithUTF8String:(text + " }").c_str()];
}
@end

@implementation NSMutableDictionary
- (void)setObject:(id)object forKey:(id<NSCopying>)key {
  if (!object || !key) throw std::invalid_argument("NSMutableDictionary: key or object is nil");
  _values[[(id)key copy]] = object;
}
- (void)setObject:(id)object forKeyedSubscript:(id<NSCopying>)key {
  if (object) {
    [self setObject:object forKey:key];
  } else {
    [self removeObjectForKey:key];
  }
}
- (void)removeObjectForKey:(id)key {
  _values.erase(key);
}
@end
