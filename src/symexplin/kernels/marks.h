/* Sums of the bits of a tensor's entries, weighted by place (symexplin.kernels.part.Backend.marks). */
#ifndef SEL_MARKS_H
#define SEL_MARKS_H

#include "lanes.h"

/* Running sums of this many blocks of 16-bit numbers fit 32 bits. */
enum { MOST_BLOCKS = 256 };

/* Weights 2 (first + j) + 1 need no product an entry: with j = WIDE b + lane, the running sum of the sums so far
   weights block b by how many follow it. */
#define DEFINE_MARKS(NAME, TYPE, SUM)                                                                            \
    static void NAME(const TYPE *x, int64_t count, int64_t first, uint64_t *plain, uint64_t *weighted) {         \
        enum { WIDE = BYTES / (int)sizeof(SUM) };                                                                \
        typedef SUM Sums_ __attribute__((vector_size(BYTES)));                                                   \
        typedef TYPE Block __attribute__((vector_size(sizeof(TYPE) * WIDE)));                                    \
        typedef TYPE Some __attribute__((vector_size(sizeof(TYPE) * WIDE), aligned(sizeof(TYPE)), may_alias));   \
        typedef u##SUM Wrapping __attribute__((vector_size(BYTES)));                                             \
        int64_t done = 0;                                                                                        \
        *plain = *weighted = 0;                                                                                  \
        while (count - done >= WIDE) {                                                                           \
            int64_t blocks = (count - done) / WIDE < MOST_BLOCKS ? (count - done) / WIDE : MOST_BLOCKS;          \
            Wrapping sum = {0}, running = {0};                                                                   \
            for (int64_t b = 0; b < blocks; b++) {                                                               \
                Block block = *(const Some *)(x + done + b * WIDE);                                              \
                sum += (Wrapping)__builtin_convertvector(block, Sums_);                                          \
                running += sum;                                                                                  \
            }                                                                                                    \
            for (int lane = 0; lane < WIDE; lane++) {                                                            \
                uint64_t of_lane = (uint64_t)(int64_t)(SUM)sum[lane];                                            \
                uint64_t by_block = (uint64_t)blocks * of_lane - (uint64_t)(int64_t)(SUM)running[lane];          \
                *plain += of_lane;                                                                               \
                *weighted += (uint64_t)(2 * (first + done + lane) + 1) * of_lane + 2 * (uint64_t)WIDE * by_block; \
            }                                                                                                    \
            done += blocks * WIDE;                                                                               \
        }                                                                                                        \
        for (; done < count; done++) {                                                                           \
            *plain += (uint64_t)(int64_t)x[done];                                                                \
            *weighted += (uint64_t)(2 * (first + done) + 1) * (uint64_t)(int64_t)x[done];                        \
        }                                                                                                        \
    }

DEFINE_MARKS(marks_16, int16_t, int32_t)
DEFINE_MARKS(marks_32, int32_t, int64_t)
DEFINE_MARKS(marks_64, int64_t, int64_t)

/* Add the marks of `count` entries of a row, `size` bytes each, from `column` on. */
static void add_marks(const void *from, int64_t size, int64_t count, int64_t row, int64_t column, int64_t *marks) {
    uint64_t plain, weighted;
    if (size == 2) marks_16(from, count, column, &plain, &weighted);
    else if (size == 4) marks_32(from, count, column, &plain, &weighted);
    else marks_64(from, count, column, &plain, &weighted);
    marks[0] = (int64_t)((uint64_t)marks[0] + plain * (uint64_t)(2 * row + 1) * 2654435761u);
    marks[1] = (int64_t)((uint64_t)marks[1] + weighted * (uint64_t)(2 * row + 1) * 11400714819323u);
}

#endif
