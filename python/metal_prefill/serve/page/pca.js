// Principal components and cosine similarities of a few vectors.

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
  return sum;
}

/** The largest eigenvalue of a symmetric matrix and its vector, by power iteration. */
function leading(matrix) {
  const n = matrix.length;
  let vector = matrix.map((_, i) => 1 + ((i * 7919) % 13) / 13); // the same each time, and in no symmetric position
  let value = 0;
  for (let step = 0; step < 300; step += 1) {
    const next = matrix.map((row) => dot(row, vector));
    const length = Math.sqrt(dot(next, next));
    if (length < 1e-12) return { value: 0, vector: new Array(n).fill(0) };
    const moved = Math.abs(length - value);
    value = length;
    vector = next.map((x) => x / length);
    if (moved < 1e-12 * length) break;
  }
  return { value, vector };
}

/** Projects vectors on their first two principal components.
 *
 * The components are those of the matrix of inner products, [texts][texts], which is small: texts are few, and vectors
 * are long. Returns points, [texts][2], and the part of the variance along each axis.
 */
export function principal(vectors) {
  const n = vectors.length;
  const mean = vectors[0].map((_, j) => vectors.reduce((sum, v) => sum + v[j], 0) / n);
  const centred = vectors.map((v) => v.map((x, j) => x - mean[j]));
  const gram = centred.map((a) => centred.map((b) => dot(a, b)));
  const variance = gram.reduce((sum, row, i) => sum + row[i], 0);
  const axes = [];
  for (let axis = 0; axis < 2; axis += 1) {
    const { value, vector } = leading(gram);
    axes.push({ value, coordinates: vector.map((x) => x * Math.sqrt(Math.max(value, 0))) });
    for (let i = 0; i < n; i += 1) for (let j = 0; j < n; j += 1) gram[i][j] -= value * vector[i] * vector[j];
  }
  return {
    points: vectors.map((_, i) => axes.map(({ coordinates }) => coordinates[i])),
    explained: axes.map(({ value }) => (variance > 0 ? value / variance : 0)),
  };
}

/** Cosine similarities of all pairs, [texts][texts]. */
export function similarities(vectors) {
  const lengths = vectors.map((v) => Math.sqrt(dot(v, v)) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j])));
}
