// Included by language.metal.
#pragma once
#define kLanguageHeader 42.0
