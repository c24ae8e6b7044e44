/* Measures the time from a fresh worker to its first forward pass on a warm model, beside loading
 * the same parameters from a file.
 *
 * Run under `shardctl run --daemons N`. Opens a model of --params parameters (AdamW: 16 bytes of
 * state each), then in each round starts a new process that attaches and computes, and another
 * one that reads a file and computes. The times begin before connect() and open(); the forward
 * pass is a matrix-vector product with every parameter, so each of them is read once. "cold": the
 * file's pages were dropped from the page cache before.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench.h"
#include "client/shd.h"
#include "proto/base/clock.h"

#define COLUMNS 1024u
#define UNITS   16u

struct times { /* of one process, from before its first call; ms */
    double connected, opened, forward;
};

static double ms_since(uint64_t start_ns)
{
    return (double)(clock_now_ns() - start_ns) * 1e-6;
}

static _Noreturn void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_attach: %s: %s\n", what, why);
    exit(1);
}

static char *make_spec(uint64_t params)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL)
        die("spec", strerror(errno));
    fprintf(f, "{\"name\":\"warm\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},"
               "\"units\":[");
    for (unsigned u = 0; u < UNITS; u++)
        fprintf(f,
                "%s{\"name\":\"u%u\",\"tensors\":[{\"name\":\"w%u\",\"shape\":[%" PRIu64
                ",%u],\"init\":[\"normal\",0,0.02]}]}",
                u > 0 ? "," : "", u, u, params / UNITS / COLUMNS, COLUMNS);
    fprintf(f, "]}");
    fclose(f);
    return text;
}

/* y = W x, one row after the other; the sum of y, so that nothing is optimised away. */
static float forward(const float *w, uint64_t rows, const float *x)
{
    float total = 0;
    for (uint64_t r = 0; r < rows; r++) {
        float lanes[16] = { 0 };
        for (unsigned c = 0; c < COLUMNS; c += 16)
            for (unsigned j = 0; j < 16; j++)
                lanes[j] += w[r * COLUMNS + c + j] * x[c + j];
        for (unsigned j = 0; j < 16; j++)
            total += lanes[j];
    }
    return total;
}

static const float *input(void)
{
    static float x[COLUMNS];
    for (unsigned c = 0; c < COLUMNS; c++)
        x[c] = 1.0f / (float)(c + 1);
    return x;
}

static float run_attached(uint64_t params, struct times *ret)
{
    struct shd_err e;
    shd_session *s;
    shd_model *m;
    float total = 0;
    const float *x = input();
    const uint64_t start_ns = clock_now_ns();
    bench_check(shd_connect(NULL, &s, &e), &e);
    ret->connected = ms_since(start_ns);
    bench_check(shd_model_attach(s, "warm", &m, &e), &e);
    ret->opened = ms_since(start_ns);
    for (uint32_t u = 0; u < UNITS; u++) {
        const void *w;
        bench_check(shd_acquire(m, u, &w, &e), &e);
        total += forward(w, params / UNITS / COLUMNS, x);
        shd_release(m, u);
    }
    ret->forward = ms_since(start_ns);
    shd_close(s);
    return total;
}

static float run_loaded(const char *path, uint64_t params, struct times *ret)
{
    const float *x = input();
    const uint64_t start_ns = clock_now_ns();
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    float *w = malloc(params * sizeof *w);
    if (fd < 0 || w == NULL)
        die(path, strerror(errno));
    ret->connected = ms_since(start_ns);
    for (uint64_t at = 0; at < params * sizeof(float);) {
        const ssize_t n = read(fd, (uint8_t *)w + at, params * sizeof(float) - at);
        if (n <= 0)
            die(path, n < 0 ? strerror(errno) : "too short");
        at += (uint64_t)n;
    }
    ret->opened = ms_since(start_ns);
    const float total = forward(w, params / COLUMNS, x);
    ret->forward = ms_since(start_ns);
    free(w);
    close(fd);
    return total;
}

/* The same bytes as the model has, in a file. */
static void write_file(shd_model *m, const char *path, uint64_t params)
{
    struct shd_err e;
    FILE *f = fopen(path, "wbe");
    if (f == NULL)
        die(path, strerror(errno));
    for (uint32_t u = 0; u < UNITS; u++) {
        const void *w;
        bench_check(shd_acquire(m, u, &w, &e), &e);
        if (fwrite(w, sizeof(float), params / UNITS, f) != params / UNITS)
            die(path, strerror(errno));
        shd_release(m, u);
    }
    if (fflush(f) != 0 || fsync(fileno(f)) != 0 || fclose(f) != 0)
        die(path, strerror(errno));
}

/* A new process runs this program again as `mode`; what it measured comes back by a pipe. */
static struct times measure(const char *mode, const char *path, uint64_t params)
{
    int pipe_fds[2];
    char count[24];
    struct times t = { 0 };
    snprintf(count, sizeof count, "%" PRIu64, params);
    if (pipe(pipe_fds) != 0)
        die("pipe", strerror(errno));
    const pid_t pid = fork();
    if (pid < 0)
        die("fork", strerror(errno));
    if (pid == 0) {
        dup2(pipe_fds[1], STDOUT_FILENO);
        execl("/proc/self/exe", "bench_attach", mode, path, count, (char *)NULL);
        _exit(127);
    }
    close(pipe_fds[1]);
    FILE *f = fdopen(pipe_fds[0], "r");
    const int got = fscanf(f, "%lf %lf %lf", &t.connected, &t.opened, &t.forward);
    fclose(f);
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0 || got != 3)
        die(mode, "its process failed");
    return t;
}

static int run_mode(char **argv)
{
    struct times t;
    const uint64_t params = strtoull(argv[3], NULL, 10);
    const float total = strcmp(argv[1], "--attach") == 0 ? run_attached(params, &t)
                                                         : run_loaded(argv[2], params, &t);
    printf("%.3f %.3f %.3f\n", t.connected, t.opened, t.forward);
    fprintf(stderr, "%s", total == 12345 ? " " : ""); /* the sum is used */
    return 0;
}

static void drop_from_cache(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

static void add(struct stat_series series[3], const struct times *t)
{
    stat_add(&series[0], t->connected);
    stat_add(&series[1], t->opened);
    stat_add(&series[2], t->forward);
}

static void run_rounds(const char *path, uint64_t params, unsigned rounds, bool json)
{
    static struct stat_series attach[3], warm[3], cold[3];
    for (unsigned i = 0; i < rounds; i++) {
        struct times t = measure("--attach", path, params);
        add(attach, &t);
        t = measure("--load", path, params);
        add(warm, &t);
        drop_from_cache(path);
        t = measure("--load", path, params);
        add(cold, &t);
    }
    stat_print_head(json);
    stat_print(json, "attach: connected", "ms", &attach[0]);
    stat_print(json, "attach: model mapped", "ms", &attach[1]);
    stat_print(json, "attach: first forward done", "ms", &attach[2]);
    stat_print(json, "file, cached: read", "ms", &warm[1]);
    stat_print(json, "file, cached: first forward done", "ms", &warm[2]);
    stat_print(json, "file, cold: read", "ms", &cold[1]);
    stat_print(json, "file, cold: first forward done", "ms", &cold[2]);
    const struct stat_series ratio = stat_ratio(&warm[2], &attach[2]);
    stat_print(json, "file, cached / attach", "ratio", &ratio);
}

int main(int argc, char **argv)
{
    static uint64_t params = 80u << 20;
    static uint32_t rounds = 5;
    static bool json;
    static const struct flag table[] = {
        { "params", 0, FLAG_U64, "P", "parameters (83886080)", &params, UNITS * COLUMNS, 0x1p40 },
        { "rounds", 0, FLAG_U32, "R", "of each figure (5)", &rounds, 1, STAT_ROUNDS_MAX },
        BENCH_JSON(&json),
    };
    const struct flags flags = {
        .usage = "shardctl run --daemons N -- bench_attach [flags]",
        .about = "The first forward of a fresh worker on a warm model, beside loading a file.",
        .table = table,
        .count = sizeof table / sizeof table[0],
    };
    if (argc == 4 && (strcmp(argv[1], "--attach") == 0 || strcmp(argv[1], "--load") == 0))
        return run_mode(argv);
    bench_flags(&flags, argc, argv, NULL);
    params = params / (UNITS * COLUMNS) * (UNITS * COLUMNS);
    struct shd_err e;
    shd_session *s;
    shd_model *m;
    char *spec = make_spec(params);
    bench_check(shd_connect(NULL, &s, &e), &e);
    bench_check(shd_model_open(s, spec, &m, &e), &e);
    free(spec);
    char path[64];
    snprintf(path, sizeof path, "/var/tmp/bench_attach.%d", (int)getpid());
    write_file(m, path, params);
    if (!json)
        printf("%.1f M parameters, %.2f GB of state in %" PRIu32 " daemons, %.0f MB read by a "
               "forward pass\n",
               (double)params * 1e-6, (double)params * 16e-9, shd_owners(s), (double)params * 4e-6);
    run_rounds(path, params, rounds, json);
    unlink(path);
    shd_close(s);
    return 0;
}
