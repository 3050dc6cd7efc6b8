// The gated activation with limits of gpt-oss: gate * sigmoid(slope * gate) * (up + 1), of a gate that is at
// most the limit and an up within it on both sides. Shared by the engines.
#pragma once

#define CLAMPED_SILU_SLOPE 1.702f
#define CLAMPED_SILU_LIMIT 7.0f
