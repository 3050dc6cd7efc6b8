// NSArray and NSDictionary over standard containers.
#import <Foundation/Foundation.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// Keys of dictionaries are strings.
std::string text_of(id key) {
  return static_cast<NSString*>(key).UTF8String;
}

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
  std::map<std::string, std::pair<id, id>> _entries;  // key and value, by the key's text
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
    dictionary->_entries[text_of(keys[i])] = {keys[i], objects[i]};
  }
  return dictionary;
}

- (NSUInteger)count {
  return _entries.size();
}
- (id)objectForKeyedSubscript:(id)key {
  const auto found = _entries.find(text_of(key));
  return found == _entries.end() ? nil : found->second.second;
}
- (id)copyWithZone:(NSZone*)zone {
  NSDictionary* copy = [NSDictionary dictionary];
  copy->_entries = _entries;
  return copy;
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)capacity {
  std::vector<id __unsafe_unretained> keys;
  for (const auto& [text, entry] : _entries) keys.push_back(entry.first);
  return enumerate(keys, state, buffer, capacity);
}
@end

@implementation NSMutableDictionary
- (void)setObject:(id)object forKeyedSubscript:(id<NSCopying>)key {
  if (!object || !key) throw std::invalid_argument("NSMutableDictionary: key or object is nil");
  _entries[text_of(key)] = {key, object};
}
@end
