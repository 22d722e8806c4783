// Attention with a distance table on a CPU: plain C++ with a C interface, no dependency but the C++ runtime.
//
// This file is compiled several times (see build.py): once for each instruction set, with MILEPOST_WIDTH = floats in a
// vector and MILEPOST_ISA = its name, and once more without them for the interface, the threads and the choice at run
// time. The parts made for an instruction set use no C++ library at all, so that the linker can never hand a function
// compiled for a newer processor to an older one.
//
// Logits are kept in base 2: keys are packed times scale * log2(e), the table times log2(e).

#include <stdint.h>

namespace milepost {

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { TILE = 64 };         // keys in one packed tile
enum { BLOCK = 256 };       // keys handled between two updates of the running maximum
enum { FORWARD_ROWS = 384 };   // stacked query rows of one forward task
enum { BACKWARD_ROWS = 96 };   // query rows packed at a time in the backward pass
enum { PAD = FORWARD_ROWS + 2 * BLOCK + 64 };  // room around a line, so that whole tiles may be loaded
enum { TURN_ROWS = 64 };    // rows of every head that one task rotates, so that their angles stay close
enum { FEW_ROWS = 8 };      // so few rows are not worth a packed copy of the keys
enum { STRIDE = BLOCK + 16 };  // from row to row of weights: of a power of two, few lines of a column stay in a cache
enum { LINE_CHUNK = 64 };   // distances summarised by one maximum

struct View {  // (batch, head, row, size): strides in elements, the last axis contiguous
    const void *data;
    int64_t batch, head, row;
};

struct Call {
    int64_t batch, heads, key_heads, queries, keys, size, value_size;
    int64_t first, distances, offset, intervals;  // intervals: batch rows of lo and hi, 1 or batch
    double scale, skip_eps;
    int64_t dtype, threads, table_grad;
    View q, k, v, out, grad_out;
    const float *table;          // (heads, distances)
    const int64_t *lo, *hi;      // (intervals, queries)
    const float *key_bound;      // (batch, key_heads): no key's norm is larger; NULL: norms are taken here
    const float *grad_lse;       // (batch, heads, queries)
    float *lse;                  // (batch, heads, queries)
    void *result;                // forward: out, contiguous
    float *grad_q, *grad_k, *grad_v, *grad_table;  // contiguous
};

struct Turn {  // a rotation of pairs of channels: (a, b) to (a cos - b sin, b cos + a sin)
    int64_t batch, heads, length, size, pairs, interleaved, dtype, threads;
    double rest;             // what channels that are not rotated are multiplied with
    View x, cos, sin, out;   // cos and sin: float32, their strides 0 where they are shared
};

struct Shared {  // what all threads of a call read, made by `prepare`
    Call call;
    int64_t group, rows, row_blocks, key_tiles, chunks, line_stride, padded, value_padded;
    float threshold;       // log2(keys / eps); skip == 0: leave no key out
    int64_t skip;
    int64_t *lo, *hi;      // the intervals, within [0, keys]
    float *line;           // (heads, line_stride): the table reversed, in base 2, zeros around it
    float *line_top;       // (heads, line_stride / LINE_CHUNK): maxima
    float *key_norm;       // (batch * key_heads, key_tiles): largest |k| in a tile
    float *query_norm;     // (batch * heads, queries), backward only
    float *delta;          // (batch * heads, queries), backward only
    int64_t *block_lo, *block_hi;  // (intervals, row_blocks): keys that any row of a block sees, backward only
    float *query_parts;    // (chunks, batch * heads, queries, padded)
    float *table_parts;    // (batch * key_heads * chunks, group, line_stride)
    const Turn *turn;      // of `rotate` alone
};

typedef void (*Step)(Shared *, int64_t task, char *scratch);

struct Kernel {
    const char *name;
    int64_t width;
    Step prepare_line, prepare_keys, prepare_rows, forward, backward, finish_rows, finish_table, rotate;
    int64_t (*forward_scratch)(const Shared *);
    int64_t (*backward_scratch)(const Shared *);
};

}  // namespace milepost

#ifdef MILEPOST_ISA

#include <math.h>
#include <string.h>

namespace milepost {
namespace {

enum { W = MILEPOST_WIDTH };
#if defined(__AVX512F__) || defined(__aarch64__)
enum { MR = 6, NV = 4 };  // register tile: 6 rows x 4 vectors, of 32 registers
#else
enum { MR = 6, NV = 2 };  // of 16 registers
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));
typedef float Loose __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))  // inner loops of their own, so that they get all registers
#define UNROLL _Pragma("GCC unroll 16")

const float LOG2E = 1.44269504088896340736f;
const float LN2 = 0.69314718055994530942f;

INLINE Vec load(const float *p) { return *(const Loose *)p; }
INLINE void store(float *p, Vec x) { *(Loose *)p = x; }
INLINE Vec fill(float x) { return x - (Vec){}; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float larger_or_nan(float a, float b) { return b <= a ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE Vec count_up() {
    Vec x;
    for (int i = 0; i < W; i++) x[i] = (float)i;
    return x;
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Int){__VA_ARGS__})
#endif
#if MILEPOST_WIDTH == 16
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define FOLD(x, by) SHUFFLE(x, x, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7, by + 8, by + 9, by + 10, \
                            by + 11, by + 12, by + 13, by + 14, by + 15)
#elif MILEPOST_WIDTH == 8
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define FOLD(x, by) SHUFFLE(x, x, by, by + 1, by + 2, by + 3, by + 4, by + 5, by + 6, by + 7)
#else
#define LOW_HALVES 0, 4, 1, 5
#define HIGH_HALVES 2, 6, 3, 7
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define FOLD(x, by) SHUFFLE(x, x, by, by + 1, by + 2, by + 3)
#endif

INLINE float sum_of(Vec x) {
#if MILEPOST_WIDTH == 16
    x += FOLD(x, 8);
#endif
#if MILEPOST_WIDTH >= 8
    x += FOLD(x, 4);
#endif
    x += FOLD(x, 2);
    x += FOLD(x, 1);
    return x[0];
}

INLINE float top_of(Vec x) {
#if MILEPOST_WIDTH == 16
    x = larger(FOLD(x, 8), x);
#endif
#if MILEPOST_WIDTH >= 8
    x = larger(FOLD(x, 4), x);
#endif
    x = larger(FOLD(x, 2), x);
    x = larger(FOLD(x, 1), x);
    return x[0];
}

// 2^x, relative error below 2e-7; 0 below -126.5; NaN stays NaN.
INLINE Vec power_of_two(Vec x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Vec bounded = x < -127.0f ? fill(-127.0f) : x;  // whose exponent bits are those of 0
    Vec shifted = bounded + magic;
    Vec f = bounded - (shifted - magic);
    Vec p = fill(1.3267292e-3f);
    p = p * f + 9.6701293e-3f;
    p = p * f + 5.5507337e-2f;
    p = p * f + 2.4022203e-1f;
    p = p * f + 6.9314697e-1f;
    p = p * f + 1.0f;
    Int bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - (0x4B400000 - 127)) << 23;
    Vec power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

// ---- reading and writing rows of float32 or bfloat16 -----------------------------------------------------------------

INLINE float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

typedef uint16_t Halves __attribute__((vector_size(W * 2)));
typedef uint16_t LooseHalves __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));

INLINE Vec load_as(const float *p) { return load(p); }
INLINE void store_as(float *p, Vec x) { store(p, x); }

INLINE Vec load_as(const uint16_t *p) {
    const Halves halves = *(const LooseHalves *)p;
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    Vec x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE void store_as(uint16_t *p, Vec x) {
    Bits bits;
    memcpy(&bits, &x, sizeof bits);
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Bits nan = ((bits & 0x7fffffffu) > 0x7f800000u) ? (Bits){} + 0x7fc0u : rounded;
    *(LooseHalves *)p = __builtin_convertvector(nan, Halves);
}

INLINE float one(float x) { return x; }
INLINE float one(uint16_t x) { return from_bfloat16(x); }
INLINE void put(float *p, float x) { *p = x; }
INLINE void put(uint16_t *p, float x) { *p = to_bfloat16(x); }

INLINE int64_t place(const View &view, int64_t batch, int64_t head, int64_t row) {
    return batch * view.batch + head * view.head + row * view.row;
}

// One row times `scale`, zeros from `size` to `padded`.
INLINE void read_row(float *to, const void *data, int64_t at, int64_t dtype, int64_t size, int64_t padded, float scale) {
    if (dtype == FLOAT32) {
        const float *from = (const float *)data + at;
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale;
    } else {
        const uint16_t *from = (const uint16_t *)data + at;
        for (int64_t i = 0; i < size; i++) to[i] = from_bfloat16(from[i]) * scale;
    }
    for (int64_t i = size; i < padded; i++) to[i] = 0.0f;
}

INLINE void write_row(void *data, int64_t at, int64_t dtype, const float *from, int64_t size, float scale) {
    if (dtype == FLOAT32) {
        float *to = (float *)data + at;
        for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale;
    } else {
        uint16_t *to = (uint16_t *)data + at;
        for (int64_t i = 0; i < size; i++) to[i] = to_bfloat16(from[i] * scale);
    }
}

INLINE void shuffle(Vec (&to)[W], const Vec (&from)[W]) {
    UNROLL for (int i = 0; i < W / 2; i++) {
        to[2 * i] = SHUFFLE(from[i], from[i + W / 2], LOW_HALVES);
        to[2 * i + 1] = SHUFFLE(from[i], from[i + W / 2], HIGH_HALVES);
    }
}

// W rows of W floats, transposed: log2(W) perfect shuffles.
INLINE void transpose(Vec (&rows)[W]) {
    Vec other[W];
    shuffle(other, rows);
    shuffle(rows, other);
#if MILEPOST_WIDTH >= 8
    shuffle(other, rows);
#if MILEPOST_WIDTH == 16
    shuffle(rows, other);
#else
    UNROLL for (int i = 0; i < W; i++) rows[i] = other[i];
#endif
#endif
}

// Up to TILE rows from `row` on, transposed to (size, TILE), times `scale`; zeros where there is no row.
APART void pack_transposed(float *to, const View &view, int64_t batch, int64_t head, int64_t row, int64_t count, int64_t dtype,
                     int64_t size, float scale) {
    const int64_t from = place(view, batch, head, row);
    for (int64_t d = 0; d < size; d += W) {
        const int64_t deep = least(W, size - d);
        for (int64_t j = 0; j < TILE; j += W) {
            if (dtype == FLOAT32 && deep == W && j + W <= count) {
                const float *data = (const float *)view.data + from + j * view.row + d;
                Vec rows[W];
                UNROLL for (int i = 0; i < W; i++) rows[i] = load(data + i * view.row) * scale;
                transpose(rows);
                UNROLL for (int i = 0; i < W; i++) store(to + (d + i) * TILE + j, rows[i]);
                continue;
            }
            float block[W][W];
            for (int i = 0; i < W; i++)
                if (j + i < count)
                    read_row(block[i], view.data, from + (j + i) * view.row + d, dtype, deep, W, scale);
                else
                    memset(block[i], 0, sizeof block[i]);
            Vec rows[W];
            UNROLL for (int i = 0; i < W; i++) rows[i] = load(block[i]);
            transpose(rows);
            for (int64_t i = 0; i < deep; i++) store(to + (d + i) * TILE + j, rows[i]);
        }
    }
}

// Whether rows of a view already lie as `pack_rows` would put them.
INLINE bool is_packed(const Call &c, const View &view, int64_t size, int64_t padded) {
    return c.dtype == FLOAT32 && size == padded && view.row == size;
}

APART void pack_rows(float *to, const View &view, int64_t batch, int64_t head, int64_t row, int64_t count, int64_t dtype,
               int64_t size, int64_t padded, float scale) {
    const int64_t from = place(view, batch, head, row);
    for (int64_t i = 0; i < count; i++)
        read_row(to + i * padded, view.data, from + i * view.row, dtype, size, padded, scale);
}

template <class T>
INLINE float norm_of_row(const T *x, int64_t size) {
    Vec sums = {};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        const Vec some = load_as(x + i);
        sums += some * some;
    }
    for (; i < size; i++) rest += one(x[i]) * one(x[i]);
    return sqrtf(sum_of(sums) + rest);
}

float norm_of(const void *data, int64_t at, int64_t dtype, int64_t size) {
    return dtype == FLOAT32 ? norm_of_row((const float *)data + at, size) : norm_of_row((const uint16_t *)data + at, size);
}

// ---- the one matrix product: acc[r][:] += sum over t of a[r * row_step + t * step] * b[t * width ...] ------------------

template <int ROWS, int VECS>
INLINE void multiply(Vec (&acc)[ROWS][VECS], const float *a, int64_t row_step, int64_t step, const float *b,
                     int64_t b_step, int64_t terms) {
    for (int64_t t = 0; t < terms; t++) {
        Vec right[VECS];
        UNROLL for (int v = 0; v < VECS; v++) right[v] = load(b + v * W);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Vec left = fill(a[r * row_step]);
            UNROLL for (int v = 0; v < VECS; v++) acc[r][v] += left * right[v];
        }
        a += step;
        b += b_step;
    }
}

// c[r][:] = c[r][:] * (by ? by[r] : 1) + product, for ROWS rows and `width` columns (a multiple of W)
template <int ROWS, int VECS>
INLINE void update_columns(float *c, int64_t c_step, const float *by, const float *a, int64_t row_step, int64_t step,
                           const float *b, int64_t b_step, int64_t terms) {
    Vec acc[ROWS][VECS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
        acc[r][v] = by ? load(c + r * c_step + v * W) * by[r] : load(c + r * c_step + v * W);
    multiply<ROWS, VECS>(acc, a, row_step, step, b, b_step, terms);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) store(c + r * c_step + v * W, acc[r][v]);
}

template <int ROWS>
APART void update(float *c, int64_t c_step, int64_t width, const float *by, const float *a, int64_t row_step, int64_t step,
            const float *b, int64_t b_step, int64_t terms) {
    int64_t at = 0, left = width / W;
    while (left > 0) {
        if (left == 1) {
            update_columns<ROWS, 1>(c + at, c_step, by, a, row_step, step, b + at, b_step, terms);
            at += W, left -= 1;
        } else if (NV < 4 || left == 2 || left == 5) {
            update_columns<ROWS, 2>(c + at, c_step, by, a, row_step, step, b + at, b_step, terms);
            at += 2 * W, left -= 2;
        } else if (left == 3) {
            update_columns<ROWS, NV < 4 ? 2 : 3>(c + at, c_step, by, a, row_step, step, b + at, b_step, terms);
            at += 3 * W, left -= 3;
        } else {
            update_columns<ROWS, NV>(c + at, c_step, by, a, row_step, step, b + at, b_step, terms);
            at += NV * W, left -= NV;
        }
    }
}

#define FOR_ROWS(rows, call) \
    switch (rows) { \
        case 1: { enum { ROWS = 1 }; call; } break; \
        case 2: { enum { ROWS = 2 }; call; } break; \
        case 3: { enum { ROWS = 3 }; call; } break; \
        case 4: { enum { ROWS = 4 }; call; } break; \
        case 5: { enum { ROWS = 5 }; call; } break; \
        default: { enum { ROWS = 6 }; call; } \
    }

INLINE void update_rows(int64_t rows, float *c, int64_t c_step, int64_t width, const float *by, const float *a,
                        int64_t row_step, int64_t step, const float *b, int64_t b_step, int64_t terms) {
    FOR_ROWS(rows, update<ROWS>(c, c_step, width, by, a, row_step, step, b, b_step, terms))
}

// ---- lines -----------------------------------------------------------------------------------------------------------

// The bias of row `i` (query slot offset + i) and key j stands at line_place(i) + j of the head's line.
INLINE int64_t line_place(const Shared *s, int64_t i) {
    const Call &c = s->call;
    return PAD + c.distances - 1 + c.first - c.offset - i;
}

void prepare_line(Shared *s, int64_t head, char *) {
    const Call &c = s->call;
    float *line = s->line + head * s->line_stride;
    const float *table = c.table + head * c.distances;
    memset(line, 0, (size_t)s->line_stride * sizeof(float));
    for (int64_t x = 0; x < c.distances; x++) line[PAD + x] = table[c.distances - 1 - x] * LOG2E;
    if (!s->skip) return;
    float *tops = s->line_top + head * (s->line_stride / LINE_CHUNK);
    for (int64_t x = 0; x < s->line_stride; x += LINE_CHUNK) {
        float top = -INFINITY;
        for (int64_t y = x; y < x + LINE_CHUNK; y++)
            if (y >= PAD && y < PAD + c.distances) top = larger_or_nan(top, line[y]);
        tops[x / LINE_CHUNK] = top;
    }
}

// Upper bound of the biases at places [from, end] of a head's line.
INLINE float line_top(const Shared *s, int64_t head, int64_t from, int64_t end) {
    const float *tops = s->line_top + head * (s->line_stride / LINE_CHUNK);
    const int64_t last = least(end, s->line_stride - 1) / LINE_CHUNK;
    float top = -INFINITY;
    for (int64_t x = most(from, 0) / LINE_CHUNK; x <= last; x++) top = larger_or_nan(top, tops[x]);
    return top;
}

void prepare_keys(Shared *s, int64_t task, char *) {
    const Call &c = s->call;
    const int64_t batch = task / c.key_heads, head = task % c.key_heads;
    for (int64_t tile = 0; tile < s->key_tiles; tile++) {
        float top = 0.0f;
        for (int64_t j = tile * TILE; j < least(c.keys, (tile + 1) * TILE); j++)
            top = larger_or_nan(top, norm_of(c.k.data, place(c.k, batch, head, j), c.dtype, c.size));
        s->key_norm[task * s->key_tiles + tile] = top;
    }
}

// Upper bound of a product in base 2 with a query of norm 1, for keys of tiles [from, end).
INLINE float key_reach(const Shared *s, int64_t key_head, int64_t from, int64_t end) {
    float top = s->call.key_bound ? s->call.key_bound[key_head] : 0.0f;
    if (!s->call.key_bound)
        for (int64_t tile = from; tile < least(end, s->key_tiles); tile++)
            top = larger_or_nan(top, s->key_norm[key_head * s->key_tiles + tile]);
    return top * fabsf((float)s->call.scale) * LOG2E * 1.001f;
}

// ---- a strip: up to MR stacked query rows ----------------------------------------------------------------------------

struct Row {
    int64_t head, lo, hi, line;  // line: place of key 0's bias in `Shared::line`
    float norm, top, delta;      // top: running maximum (forward) or log-sum-exp (backward), base 2
};

struct Strip {
    int64_t row, rows, lo, hi;  // keys that any of its rows sees
};

INLINE Strip make_strip(const Row *rows, int64_t from, int64_t count) {
    Strip strip = {from, count, INT64_MAX, 0};
    for (int64_t r = from; r < from + count; r++)
        if (rows[r].hi > rows[r].lo) {
            strip.lo = least(strip.lo, rows[r].lo);
            strip.hi = most(strip.hi, rows[r].hi);
        }
    return strip;
}

// Whether no key in [from, end) can weigh eps / keys in any row of the strip. `reach`: see key_reach.
INLINE bool can_skip(const Shared *s, const Row *rows, const Strip &strip, int64_t from, int64_t end, float reach) {
    for (int64_t r = strip.row; r < strip.row + strip.rows; r++) {
        const Row &row = rows[r];
        const int64_t a = most(from, row.lo), b = least(end, row.hi);
        if (a >= b) continue;
        const int64_t at = row.line - row.head * s->line_stride;
        const float bound = row.norm * reach + line_top(s, row.head, at + a, at + b - 1);
        if (!(bound < row.top - s->threshold)) return false;
    }
    return true;
}

// logits of ROWS rows and keys [key, key + VECS * W): biases, less `less[r]`, plus the product; -inf where not seen
template <int ROWS, int VECS>
INLINE void logits(Vec (&acc)[ROWS][VECS], const Shared *s, const Row *rows, const float *q, int64_t q_step,
                   const float *keys, int64_t key, bool whole) {
    UNROLL for (int r = 0; r < ROWS; r++) {
        const float *line = s->line + rows[r].line + key;
        UNROLL for (int v = 0; v < VECS; v++) acc[r][v] = load(line + v * W);
    }
    multiply<ROWS, VECS>(acc, q, q_step, 1, keys, TILE, s->call.size);
    if (whole) return;
    const Vec count = count_up();
    for (int r = 0; r < ROWS; r++) {
        const float from = (float)most(rows[r].lo - key, -1), end = (float)most(-1, least(rows[r].hi - key, TILE));
        for (int v = 0; v < VECS; v++) {
            const Vec x = count + (float)(v * W);
            acc[r][v] = (x >= fill(from)) & (x < fill(end)) ? acc[r][v] : fill(-INFINITY);
        }
    }
}

INLINE bool sees_all(const Row *rows, int64_t count, int64_t from, int64_t end) {
    for (int64_t r = 0; r < count; r++)
        if (rows[r].lo > from || rows[r].hi < end) return false;
    return true;
}

// ---- forward ---------------------------------------------------------------------------------------------------------

INLINE char *take(char **scratch, int64_t bytes) {
    char *mine = *scratch;
    *scratch += round_up(bytes, 64);
    return mine;
}

int64_t forward_scratch(const Shared *s) {
    const int64_t rows = s->group * s->rows, blocks = s->key_tiles;
    return 64 * 16 + 4 * (rows * (s->padded + s->value_padded + BLOCK + W) + BLOCK * (s->padded + s->value_padded + 1)) +
           rows * (int64_t)(sizeof(Row) + sizeof(Strip) + 8) + blocks * 16;
}

// The keys of a tile up to the last one that is seen, in whole vectors.
INLINE int64_t vectors_end(int64_t seen) { return round_up(least(TILE, seen), W); }

// Runs `step` for the keys j < end of a tile, as many vectors at a time as there are.
#define FOR_VECTORS(end, step) \
    for (int64_t j = 0, left; (left = (end - j) / W) > 0; j += (left < NV ? left : NV) * W) { \
        if (left >= NV) { enum { VECS = NV }; step; } \
        else if (left == 1) { enum { VECS = 1 }; step; } \
        else if (left == 2) { enum { VECS = 2 }; step; } \
        else { enum { VECS = NV < 4 ? 1 : 3 }; step; } \
    }

template <int ROWS, int VECS>
INLINE void forward_step(const Shared *s, const Row *rows, const float *q, const float *keys, int64_t key, bool whole,
                         float *to) {
    Vec acc[ROWS][VECS];
    logits<ROWS, VECS>(acc, s, rows, q, s->padded, keys, key, whole);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) store(to + r * BLOCK + v * W, acc[r][v]);
}

template <int ROWS>
APART void forward_tile(const Shared *s, const Row *rows, const float *q, const float *keys, int64_t key, int64_t seen,
                        float *to) {
    const bool whole = sees_all(rows, ROWS, key, key + TILE);
    const int64_t end = vectors_end(seen);
    FOR_VECTORS(end, (forward_step<ROWS, VECS>(s, rows, q, keys + j, key + j, whole, to + j)))
}

// The same straight from the keys' own rows: for few rows, which would not repay a packed copy.
// Meanwhile the rows that are needed next are fetched: this block's values, and the keys of the block to come.
template <class T>
APART void forward_dots(const Shared *s, const Row *rows, int64_t count, const float *q, int64_t batch, int64_t key_head,
                        int64_t key, int64_t from, int64_t end, int64_t coming, float *to) {
    enum { LINE = 64 / sizeof(T) };  // of the cache
    const Call &c = s->call;
    const T *keys = (const T *)c.k.data + place(c.k, batch, key_head, key);
    const T *next = (const T *)c.k.data + place(c.k, batch, key_head, coming);
    const T *values = (const T *)c.v.data + place(c.v, batch, key_head, key);
    const int64_t size = c.size, last = c.keys - 1 - key;  // rows past the end are read as the last one, and hidden
    const float scale = (float)c.scale * LOG2E;
    for (int64_t j = from / W * W; j < end; j += W) {
        const Vec at = count_up() + (float)j;
        const T *starts[W];
        UNROLL for (int i = 0; i < W; i++) starts[i] = keys + least(j + i, last) * c.k.row;
        for (int64_t i = j; i < j + W; i++) {
            for (int64_t d = 0; d < c.value_size; d += LINE) __builtin_prefetch(values + i * c.v.row + d, 0, 2);
            for (int64_t d = 0; d < size; d += LINE) __builtin_prefetch(next + i * c.k.row + d, 0, 2);
        }
        for (int64_t r = 0; r < count; r++) {
            const float *mine = q + r * s->padded;
            Vec sums[W];
            UNROLL for (int i = 0; i < W; i++) {  // row after row, as they lie in memory
                sums[i] = load(mine) * load_as(starts[i]);
                for (int64_t d = W; d < size; d += W) sums[i] += load(mine + d) * load_as(starts[i] + d);
            }
            transpose(sums);
            UNROLL for (int half = W / 2; half > 0; half /= 2)
                UNROLL for (int i = 0; i < half; i++) sums[i] += sums[i + half];
            const Vec logit = sums[0] * scale + load(s->line + rows[r].line + key + j);
            const float lo = (float)most(rows[r].lo - key, -1), hi = (float)most(-1, least(rows[r].hi - key, BLOCK));
            store(to + r * BLOCK + j, (at >= fill(lo)) & (at < fill(hi)) ? logit : fill(-INFINITY));
        }
    }
}

// Logits of a strip to weights relative to new maxima; `factor`: what the sums so far must be multiplied with.
template <int ROWS>
APART void weigh(Row *rows, float *sums, float *logit, int64_t count, float *factor) {
    Vec tops[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) tops[r] = load(logit + r * BLOCK);
    for (int64_t j = W; j < count; j += W)
        UNROLL for (int r = 0; r < ROWS; r++) tops[r] = larger(load(logit + r * BLOCK + j), tops[r]);
    float level[ROWS], change[16] = {};
    UNROLL for (int r = 0; r < ROWS; r++) {
        const float before = rows[r].top, found = top_of(tops[r]);
        rows[r].top = found > before ? found : before;
        level[r] = rows[r].top == -INFINITY ? 0.0f : rows[r].top;
        change[r] = before - level[r];
    }
    for (int r = 0; r < ROWS; r += W) store(factor + r, power_of_two(load(change + r)));
    UNROLL for (int r = 0; r < ROWS; r++) {
        Vec sum = load(sums + r * W) * factor[r];
        for (int64_t j = 0; j < count; j += W) {
            const Vec p = power_of_two(load(logit + r * BLOCK + j) - level[r]);
            store(logit + r * BLOCK + j, p);
            sum += p;
        }
        store(sums + r * W, sum);
    }
}

void forward(Shared *s, int64_t task, char *scratch) {
    const Call &c = s->call;
    // Later rows first: under causality they are the longest.
    const int64_t block_row = s->row_blocks - 1 - task % s->row_blocks, pair = task / s->row_blocks;
    const int64_t batch = pair / c.key_heads, key_head = pair % c.key_heads;
    const int64_t start = block_row * s->rows, count = least(s->rows, c.queries - start), total = s->group * count;
    const int64_t *lo = s->lo + (c.intervals > 1 ? batch : 0) * c.queries;
    const int64_t *hi = s->hi + (c.intervals > 1 ? batch : 0) * c.queries;

    float *q = (float *)take(&scratch, 4 * total * s->padded);
    float *out = (float *)take(&scratch, 4 * total * s->value_padded);
    float *weight = (float *)take(&scratch, 4 * total * BLOCK);
    float *sums = (float *)take(&scratch, 4 * total * W);
    float *keys = (float *)take(&scratch, 4 * TILE * s->padded);
    float *values = (float *)take(&scratch, 4 * BLOCK * s->value_padded);
    Row *rows = (Row *)take(&scratch, total * (int64_t)sizeof(Row));
    Strip *strips = (Strip *)take(&scratch, total * (int64_t)sizeof(Strip));
    int64_t *live = (int64_t *)take(&scratch, total * 8);
    int64_t *order = (int64_t *)take(&scratch, s->key_tiles * 8);
    float *bound = (float *)take(&scratch, s->key_tiles * 4);

    for (int64_t g = 0; g < s->group; g++) {
        const int64_t head = key_head * s->group + g;
        pack_rows(q + g * count * s->padded, c.q, batch, head, start, count, c.dtype, c.size, s->padded, 1.0f);
        for (int64_t i = 0; i < count; i++) {
            Row &row = rows[g * count + i];
            row.head = head;
            row.lo = lo[start + i];
            row.hi = hi[start + i];
            row.line = head * s->line_stride + line_place(s, start + i);
            row.norm = s->skip ? norm_of(q + (g * count + i) * s->padded, 0, FLOAT32, c.size) : 0.0f;
            row.top = -INFINITY;
            row.delta = 0.0f;
        }
    }
    memset(out, 0, (size_t)(4 * total * s->value_padded));
    memset(sums, 0, (size_t)(4 * total * W));

    int64_t num_strips = 0, first = INT64_MAX, end = 0;
    for (int64_t r = 0; r < total; r += MR) {
        const Strip strip = make_strip(rows, r, least(MR, total - r));
        if (strip.lo >= strip.hi) continue;
        strips[num_strips++] = strip;
        first = least(first, strip.lo);
        end = most(end, strip.hi);
    }

    // In the order of memory; where keys may be left out, those first that may weigh most, and newest first among equals.
    int64_t blocks = 0;
    if (num_strips && !s->skip)
        for (int64_t b = first / BLOCK; b * BLOCK < end; b++) order[blocks++] = b;
    else if (num_strips)
        for (int64_t b = (end - 1) / BLOCK; b >= first / BLOCK; b--) {
            float top = -INFINITY;
            for (int64_t g = 0; g < s->group; g++) {
                const int64_t head = key_head * s->group + g, at = line_place(s, start + count - 1) + b * BLOCK;
                top = larger_or_nan(top, line_top(s, head, at, at + count + BLOCK - 2));
            }
            int64_t slot = blocks++;
            for (; slot > 0 && bound[slot - 1] < top; slot--) {
                bound[slot] = bound[slot - 1];
                order[slot] = order[slot - 1];
            }
            bound[slot] = top;
            order[slot] = b;
        }

    const bool few = total <= FEW_ROWS && c.size % W == 0 && c.value_size % W == 0;
    for (int64_t n = 0; n < blocks; n++) {
        const int64_t key = order[n] * BLOCK, key_end = least(key + BLOCK, c.keys);
        const float reach = s->skip ? key_reach(s, pair, key / TILE, key / TILE + BLOCK / TILE) : 0.0f;
        int64_t num_live = 0, used = key_end, used_end = key;
        for (int64_t i = 0; i < num_strips; i++) {
            const Strip &strip = strips[i];
            if (strip.lo >= key_end || strip.hi <= key) continue;
            if (s->skip && can_skip(s, rows, strip, key, key_end, reach)) continue;
            live[num_live++] = i;
            used = least(used, most(strip.lo, key));
            used_end = most(used_end, least(strip.hi, key_end));
        }
        if (!num_live) continue;
        const bool straight = (few && c.dtype == FLOAT32) || is_packed(c, c.v, c.value_size, s->value_padded);
        const float *value_rows = straight ? (const float *)c.v.data + place(c.v, batch, key_head, key) : values;
        const int64_t value_step = straight ? c.v.row : s->value_padded;
        if (few) {
            const int64_t coming = order[n + 1 < blocks ? n + 1 : n] * BLOCK;
            for (int64_t i = 0; i < num_live; i++) {
                const Strip &strip = strips[live[i]];
                const int64_t from = most(strip.lo, key) - key, to = least(strip.hi, key_end) - key;
                float *logit = weight + strip.row * BLOCK;
                for (int64_t r = 0; r < strip.rows; r++)
                    for (int64_t j = from / TILE * TILE; j < round_up(to, TILE); j++) logit[r * BLOCK + j] = -INFINITY;
                const float *mine = q + strip.row * s->padded;
                if (c.dtype == FLOAT32)
                    forward_dots<float>(s, rows + strip.row, strip.rows, mine, batch, key_head, key, from, to, coming, logit);
                else
                    forward_dots<uint16_t>(s, rows + strip.row, strip.rows, mine, batch, key_head, key, from, to, coming,
                                          logit);
            }
        }
        if (!straight)
            pack_rows(values + (used - key) * s->value_padded, c.v, batch, key_head, used, used_end - used, c.dtype,
                      c.value_size, s->value_padded, 1.0f);
        if (!few)
            for (int64_t tile = key; tile < key_end; tile += TILE) {
                if (tile >= used_end || tile + TILE <= used) continue;
                pack_transposed(keys, c.k, batch, key_head, tile, least(TILE, c.keys - tile), c.dtype, c.size,
                                (float)c.scale * LOG2E);
                for (int64_t i = 0; i < num_live; i++) {
                    const Strip &strip = strips[live[i]];
                    if (strip.lo >= tile + TILE || strip.hi <= tile) continue;
                    const float *mine = q + strip.row * s->padded;
                    float *to = weight + strip.row * BLOCK + (tile - key);
                    FOR_ROWS(strip.rows, forward_tile<ROWS>(s, rows + strip.row, mine, keys, tile, strip.hi - tile, to))
                }
            }
        for (int64_t i = 0; i < num_live; i++) {
            const Strip &strip = strips[live[i]];
            const int64_t from = most(strip.lo, key) - key, to = least(strip.hi, key_end) - key;
            const int64_t tile = from / TILE * TILE;
            float factor[16];
            FOR_ROWS(strip.rows, weigh<ROWS>(rows + strip.row, sums + strip.row * W, weight + strip.row * BLOCK + tile,
                                             round_up(to - tile, W), factor))
            update_rows(strip.rows, out + strip.row * s->value_padded, s->value_padded, s->value_padded, factor,
                        weight + strip.row * BLOCK + from, BLOCK, 1, value_rows + from * value_step, value_step,
                        to - from);
        }
    }

    for (int64_t g = 0; g < s->group; g++)
        for (int64_t i = 0; i < count; i++) {
            const Row &row = rows[g * count + i];
            const int64_t at = (batch * c.heads + row.head) * c.queries + start + i;
            const float sum = sum_of(load(sums + (g * count + i) * W));
            const bool none = sum == 0.0f;
            c.lse[at] = none ? -INFINITY : (row.top + log2f(sum)) * LN2;
            write_row(c.result, at * c.value_size, c.dtype, out + (g * count + i) * s->value_padded, c.value_size,
                      none ? 0.0f : 1.0f / sum);
        }
}

// ---- backward --------------------------------------------------------------------------------------------------------

void prepare_rows(Shared *s, int64_t task, char *) {
    const Call &c = s->call;
    const int64_t batch = task / c.heads, head = task % c.heads;
    for (int64_t i = 0; i < c.queries; i++) {
        const int64_t at = task * c.queries + i;
        s->query_norm[at] = s->skip ? norm_of(c.q.data, place(c.q, batch, head, i), c.dtype, c.size) : 0.0f;
        float sum = 0.0f;
        const int64_t a = place(c.out, batch, head, i), b = place(c.grad_out, batch, head, i);
        if (c.dtype == FLOAT32) {
            const float *x = (const float *)c.out.data + a, *y = (const float *)c.grad_out.data + b;
            Vec sums = {};
            int64_t d = 0;
            for (; d + W <= c.value_size; d += W) sums += load(x + d) * load(y + d);
            for (; d < c.value_size; d++) sum += x[d] * y[d];
            sum += sum_of(sums);
        } else {
            const uint16_t *x = (const uint16_t *)c.out.data + a, *y = (const uint16_t *)c.grad_out.data + b;
            for (int64_t d = 0; d < c.value_size; d++) sum += from_bfloat16(x[d]) * from_bfloat16(y[d]);
        }
        s->delta[at] = sum - c.grad_lse[at];
    }
}

int64_t backward_scratch(const Shared *s) {
    const int64_t rows = BACKWARD_ROWS;
    return 64 * 16 + 4 * (rows * (s->padded + s->value_padded + 2 * STRIDE) +
                          BLOCK * (3 * s->padded + 2 * s->value_padded)) +
           rows * (int64_t)(sizeof(Row) + sizeof(Strip) + 8);
}

template <int ROWS, int VECS>
INLINE void weights_step(const Shared *s, const Row *rows, const float *q, const float *keys, int64_t key, bool whole,
                         float *to) {
    Vec acc[ROWS][VECS];
    logits<ROWS, VECS>(acc, s, rows, q, s->padded, keys, key, whole);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++)
        store(to + r * STRIDE + v * W, power_of_two(acc[r][v] - rows[r].top));
}

template <int ROWS>
APART void backward_weights(const Shared *s, const Row *rows, const float *q, const float *keys, int64_t key, int64_t seen,
                            float *to) {
    const bool whole = sees_all(rows, ROWS, key, key + TILE);
    const int64_t end = vectors_end(seen);
    FOR_VECTORS(end, (weights_step<ROWS, VECS>(s, rows, q, keys + j, key + j, whole, to + j)))
    for (int r = 0; r < ROWS; r++)
        for (int64_t j = end; j < TILE; j += W) store(to + r * STRIDE + j, (Vec){});
}

template <int ROWS, int VECS>
INLINE void slopes_step(const Shared *s, const Row *rows, const float *grad, const float *values, int64_t key,
                        const float *weight, float *to, float *table) {
    Vec acc[ROWS][VECS];
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) acc[r][v] = fill(-rows[r].delta);
    multiply<ROWS, VECS>(acc, grad, s->value_padded, 1, values, TILE, s->call.value_size);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < VECS; v++) {
        acc[r][v] *= load(weight + r * STRIDE + v * W);
        store(to + r * STRIDE + v * W, acc[r][v]);
    }
    if (!table) return;
    UNROLL for (int r = 0; r < ROWS; r++) {
        float *line = table + rows[r].line % s->line_stride + key;
        UNROLL for (int v = 0; v < VECS; v++) store(line + v * W, load(line + v * W) + acc[r][v]);
    }
}

template <int ROWS>
APART void backward_logits(const Shared *s, const Row *rows, const float *grad, const float *values, int64_t key,
                           int64_t seen, const float *weight, float *to, float *table) {
    const int64_t end = vectors_end(seen);
    FOR_VECTORS(end, (slopes_step<ROWS, VECS>(s, rows, grad, values + j, key + j, weight + j, to + j, table)))
    for (int r = 0; r < ROWS; r++)
        for (int64_t j = end; j < TILE; j += W) store(to + r * STRIDE + j, (Vec){});
}

void backward(Shared *s, int64_t task, char *scratch) {
    const Call &c = s->call;
    const int64_t chunk = task % s->chunks, pair = task / s->chunks;
    const int64_t batch = pair / c.key_heads, key_head = pair % c.key_heads;
    const int64_t *lo = s->lo + (c.intervals > 1 ? batch : 0) * c.queries;
    const int64_t *hi = s->hi + (c.intervals > 1 ? batch : 0) * c.queries;
    const int64_t *block_lo = s->block_lo + (c.intervals > 1 ? batch : 0) * s->row_blocks;
    const int64_t *block_hi = s->block_hi + (c.intervals > 1 ? batch : 0) * s->row_blocks;

    float *q = (float *)take(&scratch, 4 * BACKWARD_ROWS * s->padded);
    float *grad = (float *)take(&scratch, 4 * BACKWARD_ROWS * s->value_padded);
    float *weight = (float *)take(&scratch, 4 * BACKWARD_ROWS * STRIDE);
    float *slope = (float *)take(&scratch, 4 * BACKWARD_ROWS * STRIDE);
    float *keys = (float *)take(&scratch, 4 * BLOCK * s->padded);
    float *key_rows = (float *)take(&scratch, 4 * BLOCK * s->padded);
    float *values = (float *)take(&scratch, 4 * BLOCK * s->value_padded);
    float *grad_k = (float *)take(&scratch, 4 * BLOCK * s->padded);
    float *grad_v = (float *)take(&scratch, 4 * BLOCK * s->value_padded);
    Row *rows = (Row *)take(&scratch, BACKWARD_ROWS * (int64_t)sizeof(Row));
    Strip *strips = (Strip *)take(&scratch, BACKWARD_ROWS * (int64_t)sizeof(Strip));

    float *query_part = s->query_parts + chunk * c.batch * c.heads * c.queries * s->padded;
    for (int64_t g = 0; g < s->group; g++) {
        const int64_t at = (batch * c.heads + key_head * s->group + g) * c.queries * s->padded;
        memset(query_part + at, 0, (size_t)(4 * c.queries * s->padded));
    }
    float *table_part = c.table_grad ? s->table_parts + task * s->group * s->line_stride : 0;
    if (table_part) memset(table_part, 0, (size_t)(4 * s->group * s->line_stride));

    // Chunks take key blocks in turn: under causality early blocks are the longest.
    for (int64_t key = chunk * BLOCK; key < c.keys; key += s->chunks * BLOCK) {
        const int64_t key_end = least(key + BLOCK, c.keys), tiles_end = key + round_up(key_end - key, TILE);
        const float reach = s->skip ? key_reach(s, pair, key / TILE, key / TILE + BLOCK / TILE) : 0.0f;
        memset(grad_k, 0, (size_t)(4 * BLOCK * s->padded));
        memset(grad_v, 0, (size_t)(4 * BLOCK * s->value_padded));
        bool packed = false;
        for (int64_t g = 0; g < s->group; g++)
            for (int64_t n = 0; n < s->row_blocks; n++) {
                if (block_lo[n] >= key_end || block_hi[n] <= key) continue;
                const int64_t head = key_head * s->group + g, start = n * BACKWARD_ROWS;
                const int64_t count = least(BACKWARD_ROWS, c.queries - start);
                const int64_t first_row = (batch * c.heads + head) * c.queries + start;
                for (int64_t i = 0; i < count; i++) {
                    Row &row = rows[i];
                    const float lse = c.lse[first_row + i];
                    row.head = head;
                    row.lo = lo[start + i];
                    row.hi = hi[start + i];
                    row.line = head * s->line_stride + line_place(s, start + i);
                    row.norm = s->query_norm[first_row + i];
                    row.top = lse == -INFINITY ? INFINITY : lse * LOG2E;
                    row.delta = s->delta[first_row + i];
                }
                int64_t live = 0;
                for (int64_t r = 0; r < count; r += MR) {
                    const Strip strip = make_strip(rows, r, least(MR, count - r));
                    if (strip.lo >= key_end || strip.hi <= key) continue;
                    if (s->skip && can_skip(s, rows, strip, key, key_end, reach)) continue;
                    strips[live++] = strip;
                }
                if (!live) continue;
                if (!packed) {
                    packed = true;
                    for (int64_t tile = key; tile < tiles_end; tile += TILE) {
                        const int64_t n_keys = least(TILE, c.keys - tile);
                        pack_transposed(keys + (tile - key) * c.size, c.k, batch, key_head, tile, n_keys, c.dtype,
                                        c.size, (float)c.scale * LOG2E);
                        pack_transposed(values + (tile - key) * c.value_size, c.v, batch, key_head, tile, n_keys,
                                        c.dtype, c.value_size, 1.0f);
                    }
                    pack_rows(key_rows, c.k, batch, key_head, key, key_end - key, c.dtype, c.size, s->padded,
                              (float)c.scale);
                }
                const int64_t row = strips[0].row, row_end = strips[live - 1].row + strips[live - 1].rows;
                const float *q_rows = q, *grad_rows = grad;
                if (is_packed(c, c.q, c.size, s->padded))
                    q_rows = (const float *)c.q.data + place(c.q, batch, head, start);
                else
                    pack_rows(q + row * s->padded, c.q, batch, head, start + row, row_end - row, c.dtype, c.size,
                              s->padded, 1.0f);
                if (is_packed(c, c.grad_out, c.value_size, s->value_padded))
                    grad_rows = (const float *)c.grad_out.data + place(c.grad_out, batch, head, start);
                else
                    pack_rows(grad + row * s->value_padded, c.grad_out, batch, head, start + row, row_end - row, c.dtype,
                              c.value_size, s->value_padded, 1.0f);
                float *table = table_part ? table_part + g * s->line_stride : 0;
                int64_t from = key_end, to = key;
                if (live * MR < row_end - row)
                    for (int64_t r = row; r < row_end; r++) {
                        memset(weight + r * STRIDE, 0, 4 * BLOCK);
                        memset(slope + r * STRIDE, 0, 4 * BLOCK);
                    }
                for (int64_t i = 0; i < live; i++) {
                    from = least(from, most(strips[i].lo, key));
                    to = most(to, least(strips[i].hi, key_end));
                }
                for (int64_t tile = key; tile < tiles_end; tile += TILE) {
                    if (tile >= to || tile + TILE <= from) continue;
                    for (int64_t i = 0; i < live; i++) {
                        const Strip &strip = strips[i];
                        float *p = weight + strip.row * STRIDE + (tile - key);
                        float *ds = slope + strip.row * STRIDE + (tile - key);
                        if (strip.lo >= tile + TILE || strip.hi <= tile) {
                            for (int64_t r = 0; r < strip.rows; r++) {
                                memset(p + r * STRIDE, 0, 4 * TILE);
                                memset(ds + r * STRIDE, 0, 4 * TILE);
                            }
                            continue;
                        }
                        FOR_ROWS(strip.rows,
                                 backward_weights<ROWS>(s, rows + strip.row, q_rows + strip.row * s->padded,
                                                        keys + (tile - key) * c.size, tile, strip.hi - tile, p))
                    }
                    for (int64_t i = 0; i < live; i++) {
                        const Strip &strip = strips[i];
                        if (strip.lo >= tile + TILE || strip.hi <= tile) continue;
                        float *p = weight + strip.row * STRIDE + (tile - key);
                        float *ds = slope + strip.row * STRIDE + (tile - key);
                        FOR_ROWS(strip.rows,
                                 backward_logits<ROWS>(s, rows + strip.row, grad_rows + strip.row * s->value_padded,
                                                       values + (tile - key) * c.value_size, tile, strip.hi - tile, p,
                                                       ds, table))
                    }
                }
                from -= key, to -= key;
                for (int64_t j = from; j < to; j += MR) {
                    const int64_t some = least(MR, to - j);
                    int64_t a = row_end, b = row;  // the rows that see any of these keys
                    for (int64_t i = 0; i < live; i++)
                        if (strips[i].lo < key + j + some && strips[i].hi > key + j) {
                            a = least(a, strips[i].row);
                            b = strips[i].row + strips[i].rows;
                        }
                    if (a >= b) continue;
                    update_rows(some, grad_v + j * s->value_padded, s->value_padded, s->value_padded, 0,
                                weight + a * STRIDE + j, 1, STRIDE, grad_rows + a * s->value_padded, s->value_padded, b - a);
                    update_rows(some, grad_k + j * s->padded, s->padded, s->padded, 0, slope + a * STRIDE + j, 1, STRIDE,
                                q_rows + a * s->padded, s->padded, b - a);
                }
                for (int64_t i = 0; i < live; i++) {
                    const Strip &strip = strips[i];
                    const int64_t a = most(strip.lo, key) - key, b = least(strip.hi, key_end) - key;
                    update_rows(strip.rows, query_part + (first_row + strip.row) * s->padded, s->padded, s->padded, 0,
                                slope + strip.row * STRIDE + a, STRIDE, 1, key_rows + a * s->padded, s->padded, b - a);
                }
            }
        for (int64_t j = key; j < key_end; j++) {
            const int64_t at = pair * c.keys + j;
            write_row(c.grad_k, at * c.size, FLOAT32, grad_k + (j - key) * s->padded, c.size, (float)c.scale);
            write_row(c.grad_v, at * c.value_size, FLOAT32, grad_v + (j - key) * s->value_padded, c.value_size, 1.0f);
        }
    }
}

void finish_rows(Shared *s, int64_t task, char *) {
    const Call &c = s->call;
    const int64_t part = c.batch * c.heads * c.queries * s->padded;
    for (int64_t i = 0; i < c.queries; i++) {
        const int64_t row = task * c.queries + i;
        const float *from = s->query_parts + row * s->padded;
        float *to = c.grad_q + row * c.size;
        if (from == to && s->chunks == 1) return;
        for (int64_t d = 0; d < c.size; d++) {
            float sum = from[d];
            for (int64_t n = 1; n < s->chunks; n++) sum += from[n * part + d];
            to[d] = sum;
        }
    }
}

void finish_table(Shared *s, int64_t head, char *) {
    const Call &c = s->call;
    float *to = c.grad_table + head * c.distances;
    memset(to, 0, (size_t)(4 * c.distances));
    for (int64_t batch = 0; batch < c.batch; batch++)
        for (int64_t n = 0; n < s->chunks; n++) {
            const int64_t task = (batch * c.key_heads + head / s->group) * s->chunks + n;
            const float *from = s->table_parts + (task * s->group + head % s->group) * s->line_stride + PAD;
            for (int64_t x = 0; x < c.distances; x++) to[c.distances - 1 - x] += from[x];
        }
}

// ---- rotation --------------------------------------------------------------------------------------------------------

template <class T>
INLINE void rotate_half(T *to, const T *x, const float *cos, const float *sin, int64_t pairs) {
    int64_t p = 0;
    for (; p + W <= pairs; p += W) {
        const Vec a = load_as(x + p), b = load_as(x + pairs + p), c = load(cos + p), s = load(sin + p);
        store_as(to + p, a * c - b * s);
        store_as(to + pairs + p, b * c + a * s);
    }
    for (; p < pairs; p++) {
        const float a = one(x[p]), b = one(x[pairs + p]);
        put(to + p, a * cos[p] - b * sin[p]);
        put(to + pairs + p, b * cos[p] + a * sin[p]);
    }
}

template <class T>
INLINE void rotate_interleaved(T *to, const T *x, const float *cos, const float *sin, int64_t pairs) {
    int64_t p = 0;
    for (; p + W <= pairs; p += W) {
        const Vec low = load_as(x + 2 * p), high = load_as(x + 2 * p + W), c = load(cos + p), s = load(sin + p);
        const Vec a = SHUFFLE(low, high, EVEN), b = SHUFFLE(low, high, ODD);
        const Vec first = a * c - b * s, second = b * c + a * s;
        store_as(to + 2 * p, SHUFFLE(first, second, LOW_HALVES));
        store_as(to + 2 * p + W, SHUFFLE(first, second, HIGH_HALVES));
    }
    for (; p < pairs; p++) {
        const float a = one(x[2 * p]), b = one(x[2 * p + 1]);
        put(to + 2 * p, a * cos[p] - b * sin[p]);
        put(to + 2 * p + 1, b * cos[p] + a * sin[p]);
    }
}

// `count` rows from (head, row) on, one `along` after the other: the step of a view from a row to the next.
template <class T>
APART void rotate_rows(const Turn &t, int64_t batch, int64_t head, int64_t row, int64_t count, int64_t View::*along) {
    const T *x = (const T *)t.x.data + place(t.x, batch, head, row);
    T *to = (T *)t.out.data + place(t.out, batch, head, row);
    const float *cos = (const float *)t.cos.data + place(t.cos, batch, head, row);
    const float *sin = (const float *)t.sin.data + place(t.sin, batch, head, row);
    const int64_t x_step = t.x.*along, to_step = t.out.*along, cos_step = t.cos.*along, sin_step = t.sin.*along;
    const int64_t pairs = t.pairs, size = t.size;
    const float rest = (float)t.rest;
    const bool interleaved = t.interleaved;
    for (; count > 0; count--) {
        if (interleaved)
            rotate_interleaved<T>(to, x, cos, sin, pairs);
        else
            rotate_half<T>(to, x, cos, sin, pairs);
        if (2 * pairs < size) {
            if (rest != 1.0f)
                for (int64_t d = 2 * pairs; d < size; d++) put(to + d, one(x[d]) * rest);
            else if (to != x)
                for (int64_t d = 2 * pairs; d < size; d++) to[d] = x[d];
        }
        x += x_step, to += to_step, cos += cos_step, sin += sin_step;
    }
}

template <class T>
void rotate_block(const Turn &t, int64_t batch, int64_t row, int64_t end) {
    // In the order of memory: heads of a row, or rows of a head.
    if (t.x.head < t.x.row)
        for (; row < end; row++) rotate_rows<T>(t, batch, 0, row, t.heads, &View::head);
    else
        for (int64_t head = 0; head < t.heads; head++) rotate_rows<T>(t, batch, head, row, end - row, &View::row);
}

void rotate(Shared *shared, int64_t task, char *) {
    const Turn &t = *shared->turn;
    const int64_t blocks = (t.length + TURN_ROWS - 1) / TURN_ROWS;
    const int64_t batch = task / blocks, row = task % blocks * TURN_ROWS, end = least(t.length, row + TURN_ROWS);
    if (t.dtype == FLOAT32)
        rotate_block<float>(t, batch, row, end);
    else
        rotate_block<uint16_t>(t, batch, row, end);
}

}  // namespace

#define NAME_(isa) kernel_##isa
#define NAME(isa) NAME_(isa)
#define TEXT_(isa) #isa
#define TEXT(isa) TEXT_(isa)

extern const Kernel NAME(MILEPOST_ISA);
const Kernel NAME(MILEPOST_ISA) = {TEXT(MILEPOST_ISA), W, prepare_line, prepare_keys, prepare_rows, forward, backward,
                                   finish_rows, finish_table, rotate, forward_scratch, backward_scratch};

}  // namespace milepost

#else  // the interface: threads, memory, and the choice of an instruction set

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace milepost {

#if defined(__x86_64__)
extern const Kernel kernel_avx512, kernel_avx2;
#endif
extern const Kernel kernel_portable;

namespace {

#if defined(__x86_64__)
// 2: AVX-512 (F, DQ, BW, VL), 1: AVX2 with FMA, 0: neither; of the processor, where the system keeps such registers too.
int vector_level() {
    unsigned a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if ((kept & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    const unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    return (kept & 0xe6) == 0xe6 && (b & wide) == wide ? 2 : 1;
}
#endif

const Kernel *find(const char *name) {
#if defined(__x86_64__)
    static const int level = vector_level();  // asked once: under a hypervisor the question is slow
    if (level == 2 && (!*name || !strcmp(name, "avx512"))) return &kernel_avx512;
    if (level >= 1 && (!*name || !strcmp(name, "avx2"))) return &kernel_avx2;
#endif
    if (!*name || !strcmp(name, "portable")) return &kernel_portable;
    return 0;
}

// Denormals are flushed in the threads that compute, and only while they do.
class FlushDenormals {
  public:
#if defined(__x86_64__) || defined(__i386__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        __asm__ volatile("msr fpcr, %0" : : "r"(before_ | (1ull << 24)));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }

  private:
    uint64_t before_;
#endif
};

class Memory {
  public:
    explicit Memory(int64_t bytes) : data_(0) {
        if (bytes > 0 && posix_memalign(&data_, 64, (size_t)bytes)) data_ = 0;
    }
    ~Memory() { free(data_); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    template <class T> T *as() const { return (T *)data_; }

  private:
    void *data_;
};

struct Stage {
    Step step;
    int64_t tasks;
};

// Runs the stages one after the other, the tasks of a stage on any thread; false if memory or threads are wanting.
bool run(Shared *shared, const Stage *stages, int count, int64_t threads, int64_t scratch_bytes) {
    std::atomic<int64_t> next[4], left[4];
    int64_t largest = 1;
    for (int i = 0; i < count; i++) {
        next[i] = 0;
        left[i] = stages[i].tasks;
        largest = stages[i].tasks > largest ? stages[i].tasks : largest;
    }
    threads = threads < 1 ? 1 : threads > largest ? largest : threads;
    Memory scratch((scratch_bytes + 4096) * threads);
    if (!scratch.as<char>()) return false;
    auto work = [&](int64_t mine) {
        FlushDenormals flush;
        char *space = scratch.as<char>() + mine * (scratch_bytes + 4096) / 64 * 64;
        for (int i = 0; i < count; i++) {
            for (int64_t task; (task = next[i].fetch_add(1)) < stages[i].tasks;) {
                stages[i].step(shared, task, space);
                left[i].fetch_sub(1);
            }
            while (left[i].load() > 0) std::this_thread::yield();
        }
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < threads; i++) others.emplace_back(work, i);
    } catch (...) {
        // Fewer threads do the same work.
    }
    work(0);
    for (std::thread &thread : others) thread.join();
    return true;
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Whether any head's table falls by more than the threshold; if none does, no key can ever be left out.
bool decays(const Call &c, float threshold) {
    for (int64_t head = 0; head < c.heads; head++) {
        float top = -INFINITY, low = INFINITY;
        for (int64_t x = 0; x < c.distances; x++) {
            const float bias = c.table[head * c.distances + x];
            top = bias > top ? bias : top;
            low = bias < low ? bias : low;
        }
        if (top - low > threshold * 0.6931f) return true;
    }
    return false;
}

void lay_out(Shared *s, const Call &call, const Kernel &kernel) {
    memset(s, 0, sizeof *s);
    s->call = call;
    s->group = call.heads / call.key_heads;
    s->padded = up(call.size, kernel.width);
    s->value_padded = up(call.value_size, kernel.width);
    s->key_tiles = up(call.keys, TILE) / TILE;
    s->line_stride = up(call.distances + 2 * PAD, LINE_CHUNK);
    s->threshold = call.skip_eps > 0 ? (float)log2((double)call.keys / call.skip_eps) : 0.0f;
    s->skip = call.skip_eps > 0 && call.keys > 0 && decays(call, s->threshold);
}

// Threads cost some ten microseconds each: none for less work than that.
int64_t useful_threads(const Call &c, double products) {
    const double seconds = 2.0 * products * (double)(c.size + c.value_size) / 5e10;
    return seconds < 1e-4 ? 1 : c.threads;
}

// Copies the intervals, clamped to the keys there are. Writes the least and the largest distance that is seen to `reach`
// and the number of visible pairs to `pairs`; false if the table does not hold those distances.
bool set_intervals(Shared *s, int64_t *edges, int64_t *reach, double *pairs) {
    const Call &c = s->call;
    s->lo = edges;
    s->hi = edges + c.intervals * c.queries;
    reach[0] = INT64_MAX, reach[1] = INT64_MIN, *pairs = 0;
    for (int64_t n = 0; n < c.intervals * c.queries; n++) {
        const int64_t lo = c.lo[n] < 0 ? 0 : c.lo[n], hi = c.hi[n] > c.keys ? c.keys : c.hi[n];
        s->lo[n] = lo, s->hi[n] = hi;
        if (hi <= lo) continue;
        const int64_t slot = c.offset + n % c.queries;
        reach[0] = slot - hi + 1 < reach[0] ? slot - hi + 1 : reach[0];
        reach[1] = slot - lo > reach[1] ? slot - lo : reach[1];
        *pairs += (double)(hi - lo);
    }
    *pairs *= (double)c.heads * (c.intervals > 1 ? 1.0 : (double)c.batch);
    return *pairs == 0 || (reach[0] >= c.first && reach[1] < c.first + c.distances);
}

}  // namespace
}  // namespace milepost

using namespace milepost;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// What this library was compiled from, and the size of its records; the caller compares both.
EXPORT const char *milepost_source() { return MILEPOST_SOURCE; }
EXPORT int64_t milepost_call_size() { return (int64_t)(sizeof(Call) + sizeof(Turn)); }

// The best instruction set of this processor (name = ""), or the named one; NULL if the processor lacks it.
EXPORT const char *milepost_instruction_set(const char *name) {
    const Kernel *kernel = find(name);
    return kernel ? kernel->name : 0;
}

// 0: done; 1: no such instruction set; 2: out of memory; 3: the least or the largest distance that is seen, written to
// `reach`, is not in the table.
EXPORT int milepost_forward(const Call *call, const char *name, int64_t *reach) {
    const Kernel *kernel = find(name);
    if (!kernel) return 1;
    if (!call->batch || !call->queries || !call->heads) return 0;
    Shared s;
    lay_out(&s, *call, *kernel);
    Memory edges(16 * call->intervals * call->queries);
    double visible;
    if (!edges.as<int64_t>()) return 2;
    if (!set_intervals(&s, edges.as<int64_t>(), reach, &visible)) return 3;
    // Stacked rows of a task: heads that share keys go together.
    s.rows = FORWARD_ROWS / s.group / 6 * 6;
    if (s.rows < 6) s.rows = 6;
    if (s.rows > call->queries) s.rows = call->queries;
    s.row_blocks = up(call->queries, s.rows) / s.rows;
    Memory line(4 * call->heads * s.line_stride), tops(4 * call->heads * s.line_stride / LINE_CHUNK);
    Memory norms(4 * call->batch * call->key_heads * (s.key_tiles + 1));
    s.line = line.as<float>();
    s.line_top = tops.as<float>();
    s.key_norm = norms.as<float>();
    if (!s.line || !s.line_top || !s.key_norm) return 2;
    const int64_t pairs = call->batch * call->key_heads;
    const Stage stages[] = {{kernel->prepare_line, call->heads},
                            {kernel->prepare_keys, s.skip && !call->key_bound ? pairs : 0},
                            {kernel->forward, pairs * s.row_blocks}};
    return run(&s, stages, 3, useful_threads(*call, visible), kernel->forward_scratch(&s)) ? 0 : 2;
}

EXPORT int milepost_backward(const Call *call, const char *name, int64_t *reach) {
    const Kernel *kernel = find(name);
    if (!kernel) return 1;
    if (!call->heads) return 0;
    if (!call->batch || !call->queries || !call->keys) {
        if (call->table_grad) memset(call->grad_table, 0, (size_t)(4 * call->heads * call->distances));
        const size_t keys = (size_t)(4 * call->batch * call->key_heads * call->keys);
        memset(call->grad_k, 0, keys * (size_t)call->size);
        memset(call->grad_v, 0, keys * (size_t)call->value_size);
        memset(call->grad_q, 0, (size_t)(4 * call->batch * call->heads * call->queries * call->size));
        return 0;
    }
    Shared s;
    lay_out(&s, *call, *kernel);
    Memory edges(16 * call->intervals * call->queries);
    double visible;
    if (!edges.as<int64_t>()) return 2;
    if (!set_intervals(&s, edges.as<int64_t>(), reach, &visible)) return 3;
    const int64_t pairs = call->batch * call->key_heads, blocks = up(call->keys, BLOCK) / BLOCK;
    s.rows = BACKWARD_ROWS;
    s.row_blocks = up(call->queries, s.rows) / s.rows;
    // Where few heads share the work, each head's key blocks are dealt to chunks: by shape alone, never by the number
    // of threads, so that results do not depend on it.
    s.chunks = up(8, pairs) / pairs;
    if (s.chunks > blocks) s.chunks = blocks;
    const int64_t rows = call->batch * call->heads * call->queries;
    const bool direct = s.chunks == 1 && s.padded == call->size;
    Memory line(4 * call->heads * s.line_stride), tops(4 * call->heads * s.line_stride / LINE_CHUNK);
    Memory norms(4 * pairs * (s.key_tiles + 1)), query_norms(4 * rows), delta(4 * rows);
    Memory block_edges(16 * call->intervals * s.row_blocks);
    Memory query_parts(direct ? 0 : 4 * s.chunks * rows * s.padded);
    Memory table_parts(call->table_grad ? 4 * pairs * s.chunks * s.group * s.line_stride : 0);
    s.line = line.as<float>();
    s.line_top = tops.as<float>();
    s.key_norm = norms.as<float>();
    s.query_norm = query_norms.as<float>();
    s.delta = delta.as<float>();
    s.block_lo = block_edges.as<int64_t>();
    s.query_parts = direct ? call->grad_q : query_parts.as<float>();
    s.table_parts = table_parts.as<float>();
    if (!s.line || !s.line_top || !s.key_norm || !s.query_norm || !s.delta || !s.block_lo || !s.query_parts) return 2;
    if (call->table_grad && !s.table_parts) return 2;
    s.block_hi = s.block_lo + call->intervals * s.row_blocks;
    for (int64_t b = 0; b < call->intervals; b++)
        for (int64_t n = 0; n < s.row_blocks; n++) {
            int64_t first = INT64_MAX, end = 0;
            for (int64_t i = n * s.rows; i < (n + 1) * s.rows && i < call->queries; i++) {
                const int64_t lo = s.lo[b * call->queries + i], hi = s.hi[b * call->queries + i];
                if (hi <= lo) continue;
                first = lo < first ? lo : first;
                end = hi > end ? hi : end;
            }
            s.block_lo[b * s.row_blocks + n] = first;
            s.block_hi[b * s.row_blocks + n] = end;
        }
    const int64_t threads = useful_threads(*call, 2.5 * visible), scratch = kernel->backward_scratch(&s);
    const Stage first[] = {{kernel->prepare_line, call->heads},
                           {kernel->prepare_keys, s.skip && !call->key_bound ? pairs : 0},
                           {kernel->prepare_rows, call->batch * call->heads},
                           {kernel->backward, pairs * s.chunks}};
    const Stage last[] = {{kernel->finish_rows, direct ? 0 : call->batch * call->heads},
                          {kernel->finish_table, call->table_grad ? call->heads : 0}};
    if (!run(&s, first, 4, threads, scratch)) return 2;
    if (direct && !call->table_grad) return 0;
    return run(&s, last, 2, threads, 64) ? 0 : 2;
}

EXPORT int milepost_rotate(const Turn *turn, const char *name) {
    const Kernel *kernel = find(name);
    if (!kernel) return 1;
    Shared s;
    memset(&s, 0, sizeof s);
    s.turn = turn;
    const Stage stage = {kernel->rotate, turn->batch * (up(turn->length, TURN_ROWS) / TURN_ROWS)};
    const int64_t numbers = turn->batch * turn->heads * turn->length * turn->size;
    return run(&s, &stage, 1, numbers < 1 << 18 ? 1 : turn->threads, 64) ? 0 : 2;
}

}  // extern "C"

#endif
