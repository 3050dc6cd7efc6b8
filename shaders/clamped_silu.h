// The clamped gated activation of gpt-oss: gate * sigmoid(slope * gate) * (up + 1), with gate limited from
// above and up on both sides. Shared by the engines.
#pragma once

#define CLAMPED_SILU_SLOPE 1.702f
#define CLAMPED_SILU_LIMIT 7.0f
