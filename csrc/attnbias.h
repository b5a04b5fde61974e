// The C interface of the CPU kernels: one plain struct in, an error code out. No torch, no exceptions.
//
// Sizes are those of attention(query [B, H, Q, D], key [B, Hk, K, D], value [B, Hk, K, E]); query head h
// reads key head h / (H / Hk). The score of a related pair is softcap(scale * q.k) + the parts of the score
// terms (+ edge bias, for a pair that is kept as an edge), where softcap(s) = c * tanh(s / c), or s when c
// is 0; with a multi-level score q.k is as levels.h says. A part of -inf removes the pair. A query without
// keys has out 0, lse -inf (with a sink: the sink) and gradients of exactly 0.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AB_EXPORT __attribute__((visibility("default")))
#else
#define AB_EXPORT
#endif

// Grows with every change of a struct or function below; the caller compares it when it loads the library.
#define AB_ABI_VERSION 7

enum ab_dtype { AB_FLOAT32 = 0, AB_BFLOAT16 = 1, AB_FLOAT16 = 2 };

enum ab_status {
  AB_OK = 0,
  AB_NO_MEMORY = 1,    // a thread's buffer could not be allocated
  AB_BAD_ARGUMENT = 3  // a size or dtype that the kernels do not take
};

// Largest sizes: of E, and of D on edges; of D on tiles.
#define AB_LARGEST 256
#define AB_LARGEST_SCORE 1024

// [batch, head, row, column] in memory: strides in elements, columns dense.
typedef struct ab_tensor {
  void *data;
  int64_t batch, head, row;
  int32_t dtype;   // enum ab_dtype
  int32_t unused;  // keeps the size a multiple of 8 on every platform
} ab_tensor;

// The fields of a Layout, as its docstring describes them.
typedef struct ab_layout {
  int32_t batch, heads, groups;  // batch is 1 or B, heads is 1 or H
  int32_t tile;                  // 64 or 128
  int32_t tiles, patterns_count, edges;
  int32_t classes;                                // 2; with a multi-level score of L levels L + 2
  const int32_t *group;                           // [batch, heads]
  const int32_t *q_ptr, *q_tile, *q_mark;         // [G, q_tiles, classes + 1], [tiles + 1], [tiles + 1]
  const int32_t *k_ptr, *k_tile, *k_mark;         // [G, k_tiles, classes + 1], [tiles + 1], [tiles + 1]
  const int32_t *patterns, *patterns_t;           // [P, tile, tile / 32]; rows are queries, keys
  const int32_t *q_order, *k_order;               // [G * q_tiles], [G * k_tiles]
  const int32_t *edge_ptr, *edge_key, *edge_id;   // [G * Q + 1], [edges], [edges]
  const int32_t *col_ptr, *col_query, *col_edge;  // [G * K + 1], [edges], [edges]
  const int64_t *levels;  // [2, L]: positions of a block (0 = all are in one), dims of a pair; see levels.h
} ab_layout;

// A part of the score terms, [batch, head, ...] in memory: strides in elements, 0 = the same for all.
typedef struct ab_part {
  const float *data;              // NULL = absent
  float *grad;                    // backward adds to it; NULL = not wanted
  int64_t batch, head;            // of data
  int64_t row, column;            // of data, for a pair; the others are dense
  int64_t grad_batch, grad_head;  // of grad, whose rows and columns are dense; 0 = summed over all
} ab_part;

typedef struct ab_call {
  int64_t B, H, Hk, Q, K, D, E;
  ab_tensor q, k, v;     // of one dtype
  ab_tensor out;         // written by ab_forward, read by ab_backward
  ab_tensor dout;        // backward only, of the dtype of q
  ab_tensor dq, dk, dv;  // backward only; data NULL = not wanted
  float *lse;            // [B, H, Q], dense, natural logarithm; written by forward, read by backward
  const float *dlse;     // [B, H, Q], dense; NULL = 0
  float *row_max;  // [B, H, Q], dense: the largest score of each row, written by forward; NULL = not wanted
  float scale, softcap;  // softcap 0 = off
  int32_t threads;       // at most; results do not depend on it

  // From here to the scratch everything may be 0: no terms, no sink, no dropout, scores of q.k.
  int32_t bias_by_place;         // the edge bias is [place in edge_key, head], not [edge_id, head]
  const float *edge_bias;        // [edge_id, head] by its strides; NULL = 0
  float *dedge_bias;             // the same strides; NULL = not wanted
  int64_t bias_edge, bias_head;  // strides in elements; bias_head 0 = one value for all heads
  int64_t bias_batch;            // stride; 0 = one value for all batches
  // Added to the score of row i and key j on tiles; edges have theirs in edge_bias.
  ab_part relative;                      // [j - i + Q - 1], counted in the whole; see q_position
  ab_part key;                           // [j]
  ab_part pair;                          // [i, j]
  ab_part grid;                          // [query_code[i] - key_code[j]]
  const int32_t *query_code, *key_code;  // [Q], [K]
  int64_t grid_size;                     // numbers of a grid
  const float *sink;                     // [H]: a logit without a value; NULL = none
  uint64_t seed, drop_below;             // dropout: 32 bits of Philox below it drop a pair; 0 = none
  int64_t q_start;                       // position of the first query: dropout and levels count positions
  // For a call that is a part of a larger problem, the positions of its rows, [Q], and keys, [K]; they
  // increase, and follow each other inside a tile, which starts where one of the whole does. NULL = i +
  // q_start and j. q_start is that of the whole.
  const int32_t *q_position, *k_position;
  int64_t q_len;                    // rows of the whole; Q without positions
  int64_t first_batch, first_head;  // numbers of the first ones in the whole, which dropout counts
  float kept_share;                 // factor of the pairs that dropout keeps, 1 / (1 - p)
  float negative_slope;             // of an additive score
  // [H, D], dense: scores are sum_d additive[h, d] * LeakyReLU(q_d + k_d) instead of q.k; the layout must
  // have edges only. NULL = q.k.
  const float *additive;
  float *dadditive;  // [H, D], dense, written by backward; NULL = not wanted
  int64_t per_pair;  // multi-level scores: 1 = divide by the number of levels that a pair shares

  void *scratch;  // any contents, 64-byte aligned
  int64_t scratch_bytes;
  ab_layout layout;
} ab_call;

AB_EXPORT int32_t ab_abi_version(void);
AB_EXPORT int64_t ab_call_bytes(void);  // sizeof(ab_call)

// Both return an ab_status. If scratch_bytes is too small they do nothing and return the bytes they need,
// negated. Layouts are trusted: validate those of unknown origin first.
AB_EXPORT int64_t ab_forward(const ab_call *call);
AB_EXPORT int64_t ab_backward(const ab_call *call);

// The instruction set in use, e.g. "avx2"; and all that this machine can run, best first, separated by
// blanks.
AB_EXPORT const char *ab_isa(void);
AB_EXPORT const char *ab_isas(void);

// Use an instruction set by name from now on ("" = the best again). AB_BAD_ARGUMENT: this machine cannot
// run it.
AB_EXPORT int32_t ab_force_isa(const char *name);

// Set how many bytes ab_backward may take to hand p and dS of edges from its pass over rows to that over
// columns, and return the value before, at first 256 MiB. A graph of E edges needs 8 E for each query head
// of a key head; with less, p and dS are computed twice. Call it between calls: their scratch depends on
// it.
AB_EXPORT int64_t ab_set_edge_budget(int64_t bytes);

#ifdef __cplusplus
}
#endif
