// What stands between MLX and OpenBLAS on a Linux CPU; cpu_blas.py compiles it for the processor at hand.
//
// MLX asks for its products by `cblas_sgemm` and `cblas_dgemm`. Those of few rows are computed here, all others by
// OpenBLAS. One whose factor alpha is -2**100, -2**101 or -2**102 is no product: so cpu.py asks for a kernel of its own.
//
// Vectors are the compiler's, so that one text serves x86 and ARM.

#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { WIDTH = 16, ROWS = 4, COLUMNS = 6 };  // sums that fit into 32 registers beside what they are made of
#elif defined(__AVX__)
enum { WIDTH = 8, ROWS = 2, COLUMNS = 4 };  // into 16
#else
enum { WIDTH = 4, ROWS = 4, COLUMNS = 6 };
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int ivec __attribute__((vector_size(4 * WIDTH)));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float* x) {
    vec v;
    memcpy(&v, x, sizeof v);
    return v;
}

INLINE void store(float* x, vec v) { memcpy(x, &v, sizeof v); }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

// The sum of a vector's numbers, always in the same order: halves are added until one is left.
#define ADD_HALVES(size) { \
        typedef float part __attribute__((vector_size(size / 2))); \
        part low, high; \
        memcpy(&low, s, sizeof low); \
        memcpy(&high, (char*)s + sizeof low, sizeof low); \
        low += high; \
        memcpy(s, &low, sizeof low); \
    }

INLINE float total(vec v) {
    float s[WIDTH];
    store(s, v);
    if (WIDTH > 8) ADD_HALVES(64)
    if (WIDTH > 4) ADD_HALVES(32)
    ADD_HALVES(16)
    return s[0] + s[1];
}

// ---- products of few rows

// a (m, k) times the transposed b (n, k), both with contiguous rows, as `x @ weight.T` in a decode step. OpenBLAS first
// copies all of b into an order of its own, which pays when many rows use it. A number of the result is summed in one
// order, whatever rows and columns are computed beside it.
enum { MOST_ROWS = 8, LEAST_DEPTH = 128 };

INLINE void block(int rows, int columns, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
    vec sums[ROWS][COLUMNS];
    int l = 0;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) sums[i][j] = (vec){0};
    for (; l + WIDTH <= k; l += WIDTH)
        for (int i = 0; i < rows; i++) {
            vec x = load(a + (long)i * lda + l);
            for (int j = 0; j < columns; j++) sums[i][j] += x * load(b + (long)j * ldb + l);
        }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float sum = total(sums[i][j]);
            for (int t = l; t < k; t++) sum += a[(long)i * lda + t] * b[(long)j * ldb + t];
            c[(long)i * ldc + j] = sum;
        }
}

static void few_rows(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
#define BLOCK(rows, columns) \
    block(rows, columns, k, a + (long)i * lda, lda, b + (long)j * ldb, ldb, c + (long)i * ldc + j, ldc)
    int j = 0;
    for (; j + COLUMNS <= n; j += COLUMNS) {
        int i = 0;
        for (; i + ROWS <= m; i += ROWS) BLOCK(ROWS, COLUMNS);
        for (; i < m; i++) BLOCK(1, COLUMNS);
    }
    for (; j < n; j++)
        for (int i = 0; i < m; i++) BLOCK(1, 1);
}

// ---- kernels: each writes its result over c (m, n), which holds its first argument

// e**x to 1e-7 of itself, over the whole range: x = k log(2) + r, a polynomial in r, and 2**k as two factors, since it
// may be too large or too small for one. Below -104 it is 0, made so before the factors: what underflows is slow.
INLINE vec exponential(vec x) {
    const vec zero = {0};
    vec bounded = choose((ivec)(x > 89.0f), zero + 89.0f, x);
    ivec small = (ivec)(x < -104.0f);
    bounded = choose(small, zero, bounded);
    const float magic = 0x1.8p23f;  // whose last bit is worth 1
    vec shifted = bounded * 0x1.715476p0f + magic, k = shifted - magic;
    vec r = (bounded - k * 0x1.62e4p-1f) - k * 0x1.7f7d1cp-20f;
    vec p = zero + 0x1.a01a02p-13f;  // 1 / 7!
    p = p * r + 0x1.6c16c2p-10f;
    p = p * r + 0x1.111112p-7f;
    p = p * r + 0x1.555556p-5f;
    p = p * r + 0x1.555556p-3f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec power = (ivec)shifted - (ivec)(zero + magic), half = power >> 1;
    p = (vec)((ivec)p & ~small);
    return p * (vec)((half + 127) << 23) * (vec)((power - half + 127) << 23);
}

// c[i][j] = e**(c[i][j] - shifts[i])
static void exponentials(int m, int n, const float* shifts, float* c, int ldc) {
    for (int i = 0; i < m; i++) {
        float *row = c + (long)i * ldc, rest[WIDTH] = {0};
        int j = 0;
        for (; j + WIDTH <= n; j += WIDTH) store(row + j, exponential(load(row + j) - shifts[i]));
        memcpy(rest, row + j, (n - j) * sizeof(float));
        store(rest, exponential(load(rest) - shifts[i]));
        memcpy(row + j, rest, (n - j) * sizeof(float));
    }
}

// c[i][0] = the largest of a[i], nan where one is
static void maxima(int m, int k, const float* a, int lda, float* c, int ldc) {
    for (int i = 0; i < m; i++) {
        const float* row = a + (long)i * lda;
        vec most = (vec){0} - __builtin_inff();
        float found[WIDTH];
        int j = 0;
        for (; j + WIDTH <= k; j += WIDTH) {
            vec x = load(row + j);
            most = choose((ivec)((x > most) | (x != x)), x, most);
        }
        store(found, most);
        float one = found[0];
        for (int l = 1; l < WIDTH; l++) one = found[l] > one || found[l] != found[l] ? found[l] : one;
        for (; j < k; j++) one = row[j] > one || row[j] != row[j] ? row[j] : one;
        c[(long)i * ldc] = one;
    }
}

// c[i][0] = the sum of a[i]. Parts of 64 vectors are added up first: one running sum of 151,936 numbers is off by 1e-3.
static void sums(int m, int k, const float* a, int lda, float* c, int ldc) {
    for (int i = 0; i < m; i++) {
        const float* row = a + (long)i * lda;
        vec whole = {0};
        float rest[WIDTH] = {0}, sum = 0;
        int j = 0;
        while (j + WIDTH <= k) {
            vec part = {0};
            for (int end = j + 64 * WIDTH; j < end && j + WIDTH <= k; j += WIDTH) part += load(row + j);
            whole += part;
        }
        memcpy(rest, row + j, (k - j) * sizeof(float));
        store(rest, whole + load(rest));
        for (int l = 0; l < WIDTH; l++) sum += rest[l];
        c[(long)i * ldc] = sum;
    }
}

// One of the two above, of a transposed `a` too: its rows are gathered one by one.
static void of_rows(void (*kernel)(int, int, const float*, int, float*, int), int ta, int m, int k, const float* a,
                    int lda, float* c, int ldc) {
    if (ta == 111) {
        kernel(m, k, a, lda, c, ldc);
        return;
    }
    float* row = malloc(k * sizeof(float));
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < k; j++) row[j] = a[(long)j * lda + i];
        kernel(1, k, row, k, c + (long)i * ldc, ldc);
    }
    free(row);
}

// ---- what MLX calls

typedef void gemm_f(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void gemm_d(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);
static gemm_f* sgemm;
static gemm_d* dgemm;

void use_blas(void* single, void* both) {
    sgemm = (gemm_f*)single;
    dgemm = (gemm_d*)both;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda, const float* b,
                 int ldb, float beta, float* c, int ldc) {
    const float kernel = -0x1p100f;
    if (alpha == kernel) exponentials(m, n, a, c, ldc);
    else if (alpha == 2 * kernel) of_rows(maxima, ta, m, k, a, lda, c, ldc);
    else if (alpha == 4 * kernel) of_rows(sums, ta, m, k, a, lda, c, ldc);
    else if (m <= MOST_ROWS && k >= LEAST_DEPTH && order == 101 && ta == 111 && tb == 112 && alpha == 1 && beta == 0)
        few_rows(m, n, k, a, lda, b, ldb, c, ldc);
    else sgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int ta, int tb, int m, int n, int k, double alpha, const double* a, int lda,
                 const double* b, int ldb, double beta, double* c, int ldc) {
    dgemm(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
