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
- (id)objectAtIndexedSubscript:(NSUInteger)index {
  if (index >= _items.size()) {
    throw std::out_of_range("NSArray: index " + std::to_string(index) + " of " +
                            std::to_string(_items.size()));
  }
  return _items[index];
}
- (id)firstObject {
  return _items.empty() ? nil : _items.front();
}
- (id)copyWithZone:(NSZone*)zone {
  return [[NSArray alloc] initWithObjects:_items.data() count:_items.size()];
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)capacity {
  return enumerate(_items, state, buffer, capacity);
}
@end

@implementation NSMutableArray
- (void)addObject:(id)object {
  if (!object) throw std::invalid_argument("NSMutableArray: addObject: nil");
  _items.push_back(object);
}
@end

@implementation NSDictionary {
 @protected
  std::unordered_map<id, id, Hash, Equal> _values;
}

+ (instancetype)dictionary {
  return [[self alloc] init];
}
+ (instancetype)dictionaryWithObjects:(const id[])objects
                              forKeys:(const id<NSCopying>[])keys
                                count:(NSUInteger)count {
  NSDictionary* dictionary = [[self alloc] init];
  for (NSUInteger i = 0; i < count; i++) {
    if (!objects[i] || !keys[i]) {
      throw std::invalid_argument("NSDictionary: key or object " + std::to_string(i) + " is nil");
    }
    dictionary->_values[[(id)keys[i] copy]] = objects[i];
  }
  return dictionary;
}

- (NSUInteger)count {
  return _values.size();
}
- (id)objectForKeyedSubscript:(id)key {
  const auto found = _values.find(key);
  return found == _values.end() ? nil : found->second;
}
- (id)copyWithZone:(NSZone*)zone {
  NSDictionary* copy = [NSDictionary dictionary];
  copy->_values = _values;
  return copy;
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)capacity {
  std::vector<id __unsafe_unretained> keys;
  for (const auto& [key, value] : _values) keys.push_back(key);
  return enumerate(keys, state, buffer, capacity);
}
@end

@implementation NSMutableDictionary
- (void)setObject:(id)object forKeyedSubscript:(id<NSCopying>)key {
  if (!object || !key) throw std::invalid_argument("NSMutableDictionary: key or object is nil");
  _values[[(id)key copy]] = object;
}
@end
