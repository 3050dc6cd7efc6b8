// The part of Foundation that a Metal compute program needs, with Apple's names and types.
#pragma once

#import <Foundation/NSCollections.h>
#import <Foundation/NSObjCRuntime.h>
#import <Foundation/NSObject.h>
#import <Foundation/NSString.h>
#import <Foundation/NSValues.h>
