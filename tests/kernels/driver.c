/* Runs the compiled kernels in a process of its own, under an emulator: calls come in as bytes and go back as bytes.

   A call: seven numbers (task, magnitude, normalize, parts, threads, rows, columns of all factors), the Part of each
   matrix with an offset in place of each address, eight rates, the old and the new factors, the size of the memory that
   offsets point into, and that memory. Back: what sel_run returned, the sums, the memory. */
#include "cpu.c"

#include <stdio.h>

static void *take(size_t size) {
    void *found = malloc(size + 1);
    if (!found || fread(found, 1, size, stdin) != size) exit(1);
    return found;
}

static Factors factors_of(const int64_t *head) {
    return (Factors){{take((size_t)head[5] * FACTORS * 4), head[5]}, {take((size_t)head[6] * FACTORS * 4), head[6]}};
}

int main(void) {
    int64_t head[7], size;
    while (fread(head, sizeof *head, 7, stdin) == 7) {
        Part *parts = take((size_t)head[3] * sizeof(Part));
        Rates *rates = take(sizeof(Rates));
        Factors old = factors_of(head), new = factors_of(head);
        if (fread(&size, sizeof size, 1, stdin) != 1) return 1;
        char *memory = take((size_t)size);
        for (int64_t i = 0; i < head[3]; i++)
            for (int k = 4; k < 10; k++) {
                int64_t *field = (int64_t *)&parts[i] + k;
                *field = *field < 0 ? 0 : (int64_t)(memory + *field);
            }
        size_t sums = (size_t)(SUMS * (head[5] + head[6]) + head[3]);
        double *found = calloc(sums, sizeof *found);
        int64_t said = sel_run((int)head[0], (int)head[1], (int)head[2], parts, head[3], head[4], &old, &new, rates, found,
                               found + SUMS * head[5], found + SUMS * (head[5] + head[6]));
        fwrite(&said, sizeof said, 1, stdout);
        fwrite(found, sizeof *found, sums, stdout), fwrite(memory, 1, (size_t)size, stdout);
        fflush(stdout);
    }
}
