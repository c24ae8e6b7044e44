/* Command-line flags of one verb as a table: parsed, range-checked and explained from it.
 *
 * Forms: --name VALUE, --name=VALUE, -x, and --help / -h. The first word that is not a flag, or
 * "--", ends them.
 */
#ifndef SHD_CTL_FLAGS_H
#define SHD_CTL_FLAGS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/base/status.h"

enum flag_kind {
    FLAG_BOOL,   /* value: bool *, set to true */
    FLAG_U32,    /* value: uint32_t *, min..max */
    FLAG_RANGE,  /* value: struct flag_range *, "A" (both ends) or "A..B", A <= B, min..max */
    FLAG_STRING, /* value: const char **, borrowed from argv */
    FLAG_BYTES,  /* value: uint64_t *: a number, with KiB, MiB, GiB, TiB or KB, MB, GB, TB */
};

struct flag_range {
    uint32_t first, last;
};

struct flag {
    const char *name; /* without the dashes */
    char letter;      /* 'v' for -v; 0: none */
    enum flag_kind kind;
    const char *arg; /* what help calls the value; NULL for FLAG_BOOL */
    const char *help;
    void *value;       /* borrowed */
    uint32_t min, max; /* FLAG_U32, FLAG_RANGE */
};

struct flags {
    const char *usage; /* "shardctl run [flags] -- COMMAND [ARGS]" */
    const char *about; /* a paragraph */
    const char *more;  /* after the flags: examples, exit codes */
    const struct flag *table;
    size_t count;
};

enum flags_result { FLAGS_OK, FLAGS_HELP, FLAGS_ERROR };

/* Parse argv[1..argc). *ret_rest: index of the first word behind the flags (argc: none). Values
 * are stored as they are met. FLAGS_HELP: --help was asked for. FLAGS_ERROR fills e. */
enum flags_result flags_parse(const struct flags *f, int argc, char **argv, int *ret_rest,
                              struct shd_err *e);

/* The same for a verb without further words; does what is to be done on help and errors. Returns
 * -1 to go on, else the exit code. ret_rest may be NULL: then a further word is an error. */
int flags_start(const struct flags *f, int argc, char **argv, int *ret_rest);

/* The same for a verb with one word, in front of the flags or behind them. *ret_word: NULL when
 * there is none; *ret_more: the first word too many, or NULL. */
int flags_start_word(const struct flags *f, int argc, char **argv, const char **ret_word,
                     const char **ret_more);

void flags_help(const struct flags *f, FILE *out);

/* `shardctl VERB --list-flags`, for completion and tests: " --name" or " --name:ARG" each, letters
 * likewise, on one line without an end. flags_start() does it. */
#define FLAGS_LIST "--list-flags"
void flags_list(const struct flags *f, FILE *out);

/* `shardctl VERB --list-mdoc`: the flags as items of a list in mdoc(7), for the manual page. */
#define FLAGS_MDOC "--list-mdoc"
void flags_mdoc(const struct flags *f, FILE *out);

#endif
