/* Command-line flags of a program, or of a verb of one, as a table: parsed, range-checked and
 * explained from it.
 *
 * Forms: --name VALUE, --name=VALUE, -x, and --help / -h. The first word that is not a flag, or
 * "--", ends them.
 */
#ifndef SHD_FLAGS_H
#define SHD_FLAGS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/base/status.h"

enum flag_kind {
    FLAG_BOOL,   /* value: bool *, set to true */
    FLAG_U32,    /* value: uint32_t *, min..max */
    FLAG_U64,    /* value: uint64_t *, min..max, at most 2^53 */
    FLAG_REAL,   /* value: double *, min..max */
    FLAG_RANGE,  /* value: struct flag_range *, "A" (both ends) or "A..B", A <= B, min..max */
    FLAG_STRING, /* value: const char **, borrowed from argv */
    FLAG_LIST,   /* value: struct flag_list *, may be given again; borrowed from argv */
    FLAG_BYTES,  /* value: uint64_t *: a number, with KiB, MiB, GiB, TiB or KB, MB, GB, TB */
};

struct flag_range {
    uint32_t first, last;
};

#define FLAG_LIST_MAX 64u
struct flag_list {
    const char *items[FLAG_LIST_MAX];
    uint32_t count;
};

struct flag {
    const char *name; /* without the dashes */
    char letter;      /* 'v' for -v; 0: none */
    enum flag_kind kind;
    const char *arg; /* what help calls the value; NULL for FLAG_BOOL */
    const char *help;
    void *value;     /* borrowed */
    double min, max; /* of numbers */
};

/* A table that is put together, in the order of the help. */
#define FLAGS_MAX 80u /* of any table */
struct flag_table {
    struct flag rows[FLAGS_MAX];
    size_t count;
};

#define FLAGS_ADD(table, rows) flags_add((table), (rows), ARRAY_SIZE(rows))
void flags_add(struct flag_table *table, const struct flag *rows, size_t count);

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

/* "512", "1.5GiB", "24 GB". Errors, which go on behind what the text is of: SHD_EINVAL, SHD_ERANGE.
 */
int flags_bytes(const char *text, uint64_t *ret_bytes, struct shd_err *e);

/* Print the text of --help. */
void flags_help(const struct flags *f, FILE *out);

/* "Did you mean": the known names nearest to a mistyped one. Fill buf with what to say after
 * "unknown X": "; did you mean 'status'?" when known names come near, else "; known: run, status,
 * digest". NULLs in names[count] are no names; prefix ("--") is put before each. Only whole names,
 * ", ..." where there are more. Returns buf. */
const char *suggest(const char *word, const char *const *names, size_t count, const char *prefix,
                    char *buf, size_t bytes);

#endif
