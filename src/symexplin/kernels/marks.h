/* Sums of the bits of a tensor's entries, weighted by place (symexplin.kernels.part.Backend.marks). */
#ifndef SEL_MARKS_H
#define SEL_MARKS_H

#include "lanes.h"

enum { WORDS = BYTES / 8 };
typedef uint64_t Words __attribute__((vector_size(BYTES)));

/* Weights 2 (first + j) + 1 need no product an entry: with j = WORDS b + lane, the running sum of the sums so far
   weights block b by how many follow it. */
#define DEFINE_MARKS(NAME, TYPE)                                                                                 \
    static void NAME(const TYPE *x, int64_t count, int64_t first, uint64_t *plain, uint64_t *weighted) {         \
        typedef TYPE Some __attribute__((vector_size(sizeof(TYPE) * WORDS), aligned(sizeof(TYPE)), may_alias));   \
        typedef TYPE Block __attribute__((vector_size(sizeof(TYPE) * WORDS)));                                   \
        typedef int64_t Signed __attribute__((vector_size(BYTES)));                                              \
        Words sum = {0}, running = {0};                                                                          \
        int64_t blocks = count / WORDS;                                                                          \
        for (int64_t b = 0; b < blocks; b++) {                                                                   \
            sum += (Words)__builtin_convertvector((Block) * (const Some *)(x + b * WORDS), Signed);              \
            running += sum;                                                                                      \
        }                                                                                                        \
        uint64_t all_sum = 0, all_weighted = 0;                                                                  \
        for (int lane = 0; lane < WORDS; lane++) {                                                               \
            uint64_t by_block = (uint64_t)blocks * sum[lane] - running[lane];                                    \
            all_sum += sum[lane];                                                                                \
            all_weighted += (uint64_t)(2 * (first + lane) + 1) * sum[lane] + 2 * (uint64_t)WORDS * by_block;     \
        }                                                                                                        \
        for (int64_t j = blocks * WORDS; j < count; j++) {                                                       \
            all_sum += (uint64_t)(int64_t)x[j];                                                                  \
            all_weighted += (uint64_t)(2 * (first + j) + 1) * (uint64_t)(int64_t)x[j];                           \
        }                                                                                                        \
        *plain = all_sum, *weighted = all_weighted;                                                              \
    }

DEFINE_MARKS(marks_16, int16_t)
DEFINE_MARKS(marks_32, int32_t)
DEFINE_MARKS(marks_64, int64_t)

/* Add the marks of `count` entries of a row, `size` bytes each, from `column` on. */
static void add_marks(const void *from, int64_t size, int64_t count, int64_t row, int64_t column, int64_t *marks) {
    uint64_t plain, weighted;
    if (size == 2) marks_16(from, count, column, &plain, &weighted);
    else if (size == 4) marks_32(from, count, column, &plain, &weighted);
    else marks_64(from, count, column, &plain, &weighted);
    marks[0] = (int64_t)((uint64_t)marks[0] + plain * (uint64_t)(2 * row + 1) * 2654435761u);
    marks[1] = (int64_t)((uint64_t)marks[1] + weighted * 11400714819323u);
}

#endif
