/* Compiled formulas for CPUs: a list of parts is cut into tiles, which threads take one after the other.

   No result depends on how many threads there are: every tile writes its own sums, and whoever finishes the last tile
   of a part combines them in their order.
*/
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tile.h"

enum { WEIGHT, PULL, UPDATE, MARKS };

/* Starting a thread costs about as much as the work on this many entries. */
enum { ENTRIES_PER_THREAD = 1 << 16 };

typedef struct {
    Shared shared;
    Tile *tiles;
    int64_t tile_count, blocks; /* tiles beside each other */
    REAL *row_sums;
    atomic_int ready;
    atomic_llong left;
} Work;

typedef struct {
    int task;
    const Part *parts;
    int64_t part_count, tile_count;
    double factor, *norms;
    int64_t *marks;
    Work *works;
    Tile *tiles;
    atomic_llong next;
} Call;

static int has_sums(const Part *part) {
    for (int k = 0; k < 3; k++)
        if (part->panels[k].width) return 1;
    return 0;
}

/* With constants the compiler makes one copy of the inner loops for each case. */
#define FOR_MODE(MODE, CALL)                       \
    switch (MODE) {                                \
        case MISMATCH: CALL(MISMATCH); break;      \
        case CONGRUENT: CALL(CONGRUENT); break;    \
        case EXP_ONLY: CALL(EXP_ONLY); break;      \
        case SINH: CALL(SINH); break;              \
    }

/* EXP_ONLY goes with MISMATCH, its lambda being 0. */
static void pull_curved(const Part *part, const Shared *shared, Tile *tile, int out) {
#define PULL_MODE(MODE)                                                               \
    tile->squares = part->normalize ? pull_tile(part, shared, tile, MODE, 1, out)     \
                                    : pull_tile(part, shared, tile, MODE, 0, out)
    switch (part->mode) {
        case SINH: PULL_MODE(SINH); break;
        case CONGRUENT: PULL_MODE(CONGRUENT); break;
        default: PULL_MODE(MISMATCH); break;
    }
}

static void pull_plain(const Part *part, Tile *tile) {
    REAL copy[WIDEST];
    int64_t width = tile->column_end - tile->column;
    for (int64_t row = tile->row; row < tile->row_end; row++)
        tile->squares += squares_of(
            row_of(part->grad, part->grad_kind, row * part->cols + tile->column, width, copy), padded(width));
}

static void pull_any(const Part *part, const Shared *shared, Tile *tile) {
    if (part->mode == PLAIN) {
        pull_plain(part, tile);
        return;
    }
    pull_curved(part, shared, tile, part->out != NULL);
    /* Squares of float overflow or lose digits: again, with raw gradients written out and their squares in double. */
    if (!part->out && !(tile->squares > 1e-30 && tile->squares < 1e38)) pull_curved(part, shared, tile, 1);
}

static void update_any(const Part *part, const Shared *shared, Tile *tile, REAL factor) {
#define UPDATE_MODE(MODE) update_tile(part, shared, tile, MODE, factor)
    if (part->mode == PLAIN) UPDATE_MODE(PLAIN);
    else FOR_MODE(part->mode, UPDATE_MODE)
}

static void weight_any(const Part *part, const Shared *shared, const Tile *tile) {
#define WEIGHT_MODE(MODE) weight_tile(part, shared, tile, MODE)
    FOR_MODE(part->mode, WEIGHT_MODE)
}

/* What tiles of a part need: its factors, before and after the step of its panels. */
static void prepare(const Call *call, const Part *part, Work *work) {
    if (part->mode == PLAIN) return;
    fill_factors(part, 0, work->shared.rows, part->rows, part->rows);
    fill_factors(part, 1, work->shared.columns, part->cols, padded(part->cols));
    if (call->task != UPDATE) return;
    for (int panel = 0; panel < 3; panel++) update_panel(part, panel, call->factor);
    fill_factors(part, 0, work->shared.new_rows, part->rows, part->rows);
    fill_factors(part, 1, work->shared.new_columns, part->cols, padded(part->cols));
}

static void combine_sums(const Part *part, const Work *work) {
    Axis axis = axis_of(part, 0);
    const double all_of = whole((int)part->mode);
    double numbers[ROLES] = {0}, unused[ROLES];
    for (int64_t row = 0; row < part->rows; row++) {
        double total[SUMS] = {0};
        for (int64_t block = 0; block < work->blocks; block++)
            for (int k = 0; k < SUMS; k++) total[k] += work->row_sums[(block * part->rows + row) * SUMS + k];
        pull_factors(&axis, row, (Sums){all_of * total[0], total[1], all_of * total[2]}, numbers);
    }
    for (int role = 0; role < ROLES; role++)
        if (part->columns[role][2] >= 0) part->panels[2].gradient[part->columns[role][2]] = (REAL)numbers[role];
    axis = axis_of(part, 1);
    for (int64_t t = 0; t < work->blocks; t++) {
        int64_t start = work->tiles[t].column, end = work->tiles[t].column_end, wide = padded(end - start);
        for (int64_t column = start; column < end; column++) {
            double total[SUMS] = {0};
            for (int64_t of = t; of < work->tile_count; of += work->blocks)
                for (int k = 0; k < SUMS; k++) total[k] += work->tiles[of].column_sums[k * wide + column - start];
            pull_factors(&axis, column, (Sums){all_of * total[0], total[1], all_of * total[2]}, unused);
        }
    }
}

static void finish(const Call *call, const Part *part, const Work *work, int64_t index) {
    double squares = 0;
    uint64_t marks[2] = {0};
    for (int64_t t = 0; t < work->tile_count; t++) {
        squares += work->tiles[t].squares;
        for (int k = 0; k < 2; k++) marks[k] += (uint64_t)work->tiles[t].marks[k];
    }
    if (call->task == PULL) {
        if (call->norms) call->norms[index] = sqrt(squares);
        if (part->mode != PLAIN && has_sums(part)) combine_sums(part, work);
    } else if (call->task != WEIGHT) {
        for (int k = 0; k < 2; k++) call->marks[2 * index + k] = (int64_t)marks[k];
    }
}

static void work_on(const Call *call, Tile *tile) {
    const Part *part = &call->parts[tile->part];
    Work *work = &call->works[tile->part];
    /* Whoever prepares it is at it: those jobs come first. */
    while (!atomic_load_explicit(&work->ready, memory_order_acquire)) sched_yield();
    if (call->task == WEIGHT) weight_any(part, &work->shared, tile);
    else if (call->task == PULL) pull_any(part, &work->shared, tile);
    else if (call->task == UPDATE) update_any(part, &work->shared, tile, (REAL)call->factor);
    else
        for (int64_t row = tile->row; row < tile->row_end; row++)
            add_marks((const char *)part->weight + (row * part->cols + tile->column) * part->weight_kind,
                      part->weight_kind, tile->column_end - tile->column, row, tile->column, tile->marks);
    if (atomic_fetch_sub_explicit(&work->left, 1, memory_order_acq_rel) == 1) finish(call, part, work, tile->part);
}

static void *take_jobs(void *argument) {
    Call *call = argument;
    for (;;) {
        int64_t job = atomic_fetch_add(&call->next, 1);
        if (job >= call->part_count + call->tile_count) return NULL;
        if (job >= call->part_count) {
            work_on(call, &call->tiles[job - call->part_count]);
            continue;
        }
        if (call->task != MARKS) prepare(call, &call->parts[job], &call->works[job]);
        atomic_store_explicit(&call->works[job].ready, 1, memory_order_release);
    }
}

static int64_t blocks_of(int64_t cols) { return cols <= WIDEST ? 1 : (cols + WIDEST - 1) / WIDEST; }

static int64_t stacks_of(int64_t rows) { return rows <= TALL ? 1 : (rows + TALL - 1) / TALL; }

/* Numbers of REAL that a part needs besides its tensors. */
static int64_t scratch_of(const Part *part, int task) {
    if (part->mode == PLAIN || task == MARKS) return 0;
    int64_t blocks = blocks_of(part->cols), factors = 4 * (part->rows + padded(part->cols));
    if (task == UPDATE) return 2 * factors;
    if (task != PULL) return factors;
    return factors + SUMS * (part->rows * blocks + stacks_of(part->rows) * (part->cols + STEP * blocks));
}

static REAL *cut(REAL **scratch, int64_t count) {
    REAL *start = *scratch;
    *scratch += count;
    return start;
}

static Factors cut_factors(REAL **scratch, int64_t count) {
    REAL *kappa = cut(scratch, count), *c = cut(scratch, count), *lambda = cut(scratch, count);
    return (Factors){kappa, c, lambda, cut(scratch, count)};
}

static void lay_out(const Call *call, int64_t index, Tile *tiles, REAL *scratch) {
    const Part *part = &call->parts[index];
    Work *work = &call->works[index];
    int64_t blocks = blocks_of(part->cols), stacks = stacks_of(part->rows);
    int64_t height = (part->rows + stacks - 1) / stacks, width = padded((part->cols + blocks - 1) / blocks);
    int curved = part->mode != PLAIN && call->task != MARKS;
    *work = (Work){.tiles = tiles, .tile_count = blocks * stacks, .blocks = blocks};
    atomic_init(&work->ready, 0), atomic_init(&work->left, blocks * stacks);
    if (curved) {
        work->shared.rows = cut_factors(&scratch, part->rows);
        work->shared.columns = cut_factors(&scratch, padded(part->cols));
        if (call->task == UPDATE) {
            work->shared.new_rows = cut_factors(&scratch, part->rows);
            work->shared.new_columns = cut_factors(&scratch, padded(part->cols));
        }
        if (call->task == PULL) work->row_sums = cut(&scratch, SUMS * part->rows * blocks);
    }
    for (int64_t t = 0; t < blocks * stacks; t++) {
        int64_t row = t / blocks * height, column = t % blocks * width;
        int64_t row_end = row + height < part->rows ? row + height : part->rows;
        int64_t column_end = column + width < part->cols ? column + width : part->cols;
        if (row > row_end) row = row_end;
        if (column > column_end) column = column_end;
        tiles[t] = (Tile){.part = (int)index, .row = row, .row_end = row_end, .column = column};
        tiles[t].column_end = column_end;
        if (!curved || call->task != PULL) continue;
        tiles[t].row_sums = work->row_sums + (t % blocks * part->rows + row) * SUMS;
        tiles[t].column_sums = cut(&scratch, SUMS * padded(column_end - column));
    }
}

static void run_threads(Call *call, int64_t count) {
    pthread_t threads[count > 1 ? count : 1];
    int64_t started = 0;
    while (started < count - 1 && pthread_create(&threads[started], NULL, take_jobs, call) == 0) started++;
    take_jobs(call);
    while (started > 0) pthread_join(threads[--started], NULL);
}

/* Do a task for all parts; return 0, or 1 where there is no memory for it. */
int sel_run(int task, const Part *parts, int64_t part_count, int64_t threads, double factor, double *norms,
            int64_t *marks) {
    Call call = {.task = task, .parts = parts, .part_count = part_count, .factor = factor};
    call.norms = norms, call.marks = marks;
    int64_t numbers = 0, entries = 0;
    for (int64_t i = 0; i < part_count; i++) {
        call.tile_count += blocks_of(parts[i].cols) * stacks_of(parts[i].rows);
        numbers += scratch_of(&parts[i], task);
        entries += parts[i].rows * parts[i].cols;
    }
    call.works = malloc((size_t)(part_count + 1) * sizeof(Work));
    call.tiles = malloc((size_t)(call.tile_count + 1) * sizeof(Tile));
    REAL *scratch = malloc((size_t)(numbers + 1) * sizeof(REAL)), *at = scratch;
    int failed = !call.works || !call.tiles || !scratch;
    if (!failed) {
        Tile *tiles = call.tiles;
        for (int64_t i = 0; i < part_count; i++) {
            lay_out(&call, i, tiles, at);
            tiles += call.works[i].tile_count, at += scratch_of(&parts[i], task);
        }
        atomic_init(&call.next, 0);
        int64_t useful = entries / ENTRIES_PER_THREAD + 1;
        run_threads(&call, threads < useful ? threads : useful);
    }
    free(call.works), free(call.tiles), free(scratch);
    return failed;
}

/* The size that symexplin.kernels.cpu must agree on. */
int64_t sel_part_size(void) { return (int64_t)sizeof(Part); }
