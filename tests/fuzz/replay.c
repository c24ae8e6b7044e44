/* A fuzz target without a fuzzer: runs its seeds and what it is given, each from an exact copy.
 *
 *   replay_TARGET [FILE | DIR]...       fails by crashing, on the input it named last with -v
 *   replay_TARGET --seeds DIR           writes the seeds as files
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

static unsigned runs;
static bool verbose;

static void run_exact(const char *name, const uint8_t *data, size_t size)
{
    uint8_t *exact = malloc(size > 0 ? size : 1);
    CHECK(exact != NULL);
    memcpy(exact, data, size);
    if (verbose)
        fprintf(stderr, "%s\n", name);
    LLVMFuzzerTestOneInput(exact, size);
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
    for (unsigned i = 0; (size = fuzz_seed(i, buf, sizeof buf)) > 0; i++) {
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
    for (unsigned i = 0; (size = fuzz_seed(i, buf, sizeof buf)) > 0; i++)
        run_exact("a seed", buf, size);
}

int main(int argc, char **argv)
{
    bool ok = true;
    if (argc == 3 && strcmp(argv[1], "--seeds") == 0)
        return write_seeds(argv[2]);
    run_seeds();
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "-v") == 0)
            verbose = true;
        else
            ok = run_path(argv[i]) && ok;
    printf("%u inputs\n", runs);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
