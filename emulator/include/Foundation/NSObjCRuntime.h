// Basic types and annotations of Foundation.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(__OBJC__) || !defined(__cplusplus) || !defined(__clang__)
#error "Foundation needs Objective-C++ and clang"
#endif

// From Availability.h: the newest SDK that these headers partly provide.
#ifndef __MAC_OS_X_VERSION_MAX_ALLOWED
#define __MAC_OS_X_VERSION_MAX_ALLOWED 150000
#endif

typedef bool BOOL;  // as on arm64
#define YES true
#define NO false

#ifndef nil
#define nil nullptr
#endif

#define FOUNDATION_EXPORT extern "C"
#define NS_RETURNS_RETAINED __attribute__((ns_returns_retained))

typedef long NSInteger;
typedef unsigned long NSUInteger;

typedef double CFTimeInterval;

#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_RETURNS_INNER_POINTER __attribute__((objc_returns_inner_pointer))

#define NS_ENUM(type, name)                                        \
  enum __attribute__((enum_extensibility(open))) name : type name; \
  enum __attribute__((enum_extensibility(open))) name : type
// In C++ an option set is a plain integer, so that `a | b` converts back.
#define NS_OPTIONS(type, name) \
  type name;                   \
  enum : type
#define NS_ERROR_ENUM(domain, name) NS_ENUM(NSInteger, name)

typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;

static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}
