/* The program of all fuzz targets.
 *
 *   fuzz_replay TARGET [FILE | DIR]...  runs its seeds and what it is given, each from an exact
 * copy; fails by crashing, on the input it named last with -v fuzz_replay TARGET --seeds DIR writes
 * the seeds as files FUZZ_TARGET=TARGET fuzz ...         with libFuzzer, whose arguments follow
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

static const struct fuzz_target *const targets[] = {
    &fuzz_wire, &fuzz_side,   &fuzz_board, &fuzz_spec,     &fuzz_safetensors,
    &fuzz_text, &fuzz_keeper, &fuzz_plan,  &fuzz_ledger,   &fuzz_trail,
    &fuzz_zmtp, &fuzz_ring,   &fuzz_relay, &fuzz_planfile, &fuzz_replicas,
};

static const struct fuzz_target *target;

static void target_choose(const char *name)
{
    for (size_t i = 0; name != NULL && i < ARRAY_SIZE(targets); i++)
        if (strcmp(targets[i]->name, name) == 0)
            target = targets[i];
    if (target != NULL)
        return;
    fprintf(stderr, "no target '%s'\n", name != NULL ? name : "");
    exit(2);
}

#ifdef SHD_FUZZ

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    target_choose(getenv("FUZZ_TARGET"));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return target->input(data, size);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    return target->mutate != NULL ? target->mutate(data, size, max, seed)
                                  : LLVMFuzzerMutate(data, size, max);
}

size_t fuzz_mutate(uint8_t *data, size_t size, size_t max)
{
    return LLVMFuzzerMutate(data, size, max);
}

#else

size_t fuzz_mutate(uint8_t *data, size_t size, size_t max)
{
    (void)data;
    return size < max ? size : max;
}

static unsigned runs;
static bool verbose;

static void run_exact(const char *name, const uint8_t *data, size_t size)
{
    uint8_t *exact = malloc(size > 0 ? size : 1);
    CHECK(exact != NULL);
    memcpy(exact, data, size);
    if (verbose)
        fprintf(stderr, "%s\n", name);
    target->input(exact, size);
    free(exact);
    runs++;
}

static bool run_file(const char *path)
{
    static uint8_t buf[(size_t)1 << 21];
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }
    const size_t size = fread(buf, 1, sizeof buf, f);
    fclose(f);
    run_exact(path, buf, size);
    return true;
}

static bool run_path(const char *path)
{
    DIR *dir = opendir(path);
    if (dir == NULL)
        return run_file(path);
    bool ok = true;
    for (struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        char file[4096];
        if (d->d_name[0] == '.')
            continue;
        snprintf(file, sizeof file, "%s/%s", path, d->d_name);
        ok = run_file(file) && ok;
    }
    closedir(dir);
    return ok;
}

static int write_seeds(const char *dir)
{
    static uint8_t buf[FUZZ_SEED_BYTES_MAX];
    size_t size;
    for (unsigned i = 0; (size = target->seed(i, buf, sizeof buf)) > 0; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/seed-%03u", dir, i);
        FILE *f = fopen(path, "wb");
        if (f == NULL || fwrite(buf, 1, size, f) != size || fclose(f) != 0) {
            fprintf(stderr, "%s: %s\n", path, strerror(errno));
            return EXIT_FAILURE;
        }
    }
    return EXIT_SUCCESS;
}

static void run_seeds(void)
{
    static uint8_t buf[FUZZ_SEED_BYTES_MAX];
    size_t size;
    for (unsigned i = 0; (size = target->seed(i, buf, sizeof buf)) > 0; i++)
        run_exact("a seed", buf, size);
}

int main(int argc, char **argv)
{
    bool ok = true;
    target_choose(argc > 1 ? argv[1] : NULL);
    if (argc == 4 && strcmp(argv[2], "--seeds") == 0)
        return write_seeds(argv[3]);
    run_seeds();
    for (int i = 2; i < argc; i++)
        if (strcmp(argv[i], "-v") == 0)
            verbose = true;
        else
            ok = run_path(argv[i]) && ok;
    printf("%u inputs\n", runs);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
