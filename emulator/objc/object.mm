// NSObject and NSBlock. Compiled without ARC, since ARC's entry points call them.
#import <Foundation/Foundation.h>

extern "C" {
id metal_emulator_allocate(Class cls);
void metal_emulator_deallocate(id object);
id objc_retain(id object);
Class object_getClass(id object);
Class class_getSuperclass(Class cls);
const char* class_getName(Class cls);
BOOL class_respondsToSelector(Class cls, SEL selector);
}

@implementation NSObject
+ (id)alloc {
  return metal_emulator_allocate(static_cast<Class>(self));
}
+ (id)new {
  return [[self alloc] init];
}
+ (Class)class {
  return static_cast<Class>(self);
}

- (id)init {
  return self;
}
- (void)dealloc {
  metal_emulator_deallocate(self);
}
- (id)copy {
  return [(id<NSCopying>)self copyWithZone:nullptr];
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isKindOfClass:(Class)cls {
  for (Class c = object_getClass(self); c; c = class_getSuperclass(c)) {
    if (c == cls) return YES;
  }
  return NO;
}
- (BOOL)respondsToSelector:(SEL)selector {
  return class_respondsToSelector(object_getClass(self), selector);
}
- (NSString*)description {
  return [NSString stringWithUTF8String:class_getName(object_getClass(self))];
}
@end

// The class of blocks, which receives messages to them.
@interface NSBlock : NSObject <NSCopying>
@end

@implementation NSBlock
- (id)copyWithZone:(NSZone*)zone {
  return objc_retain(self);
}
@end
