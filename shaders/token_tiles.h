// Tiles of multi_token_matvec: the lanes that share a row multiply a tile of tokens by a few rows of weights.
// The values of a token are read once for all rows of the tile, and a weight is dequantized once for all its
// tokens.
#pragma once

// Up to MULTI_TOKEN_TILE tokens form one tile, so that each weight is dequantized once.
#define FEW_TOKEN_ROWS 2
// More tokens are divided into smaller tiles of more rows, which use the same registers and read half as
// much.
#define MANY_TOKEN_ROWS 4
#define MANY_TOKEN_TILE 4
