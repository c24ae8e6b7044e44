/* main.c: shd-gpt. Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal ended by a signal. */
#include <stdio.h>
#include <stdlib.h>

#include "examples/gpt/options.h"
#include "examples/gpt/train.h"

int main(int argc, char **argv)
{
    struct options options;
    struct shd_err e = { 0 };
    if (options_parse(argc, argv, &options, &e) != SHD_OK) {
        fprintf(stderr, "shd-gpt: %s\n", e.text);
        return 2;
    }
    if (options.help) {
        options_help(stdout);
        return 0;
    }
    if (options.version) {
        printf("shd-gpt %s\n", SHD_VERSION);
        return 0;
    }
    if (options.print_spec) {
        char *spec = train_spec(&options);
        const bool printed = spec != NULL && puts(spec) != EOF;
        free(spec);
        return printed ? 0 : 1;
    }
    struct train_end end;
    if (train_run(&options, &end, &e) != SHD_OK) {
        fflush(stdout);
        fprintf(stderr, "shd-gpt: rank %u: %s\n", options.rank, e.text);
        return end.refused ? 2 : 1;
    }
    return end.signal != 0 ? 128 + end.signal : 0;
}
