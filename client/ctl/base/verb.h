/* A verb of shardctl, and what all have in common: flags, help, a file, an answer in JSON. A verb
 * is verb_NAME() and a row in main.c's table. */
#ifndef SHD_CTL_VERB_H
#define SHD_CTL_VERB_H

#include <stddef.h>
#include <stdio.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/flags.h"

/* Of each wait of a verb that asks something and ends: it does not wait for training to go on. */
#define VERB_TIMEOUT_MS 60000u

/* argv[0] is the verb's own name. Returns the exit code (say.h). */
struct verb {
    const char *name;
    const char *summary; /* one line, for --help */
    int (*fn)(int argc, char **argv);
};

/* The struct flags of a verb whose texts are NAME_about and NAME_more. */
#define VERB_FLAGS(name, usage_, table_)                                                  \
    {                                                                                     \
        .usage = (usage_), .about = name##_about, .more = name##_more, .table = (table_), \
        .count = ARRAY_SIZE(table_)                                                       \
    }

/* The same of a struct flag_table. */
#define VERB_FLAGS_OF(name, usage_, table_)                                                    \
    {                                                                                          \
        .usage = (usage_), .about = name##_about, .more = name##_more, .table = (table_).rows, \
        .count = (table_).count                                                                \
    }

/* The flags of a verb that works on daemons, and the paragraph of its help about them. */
#define VERB_ADDRESS_FLAGS(to)                                                                   \
    {                                                                                            \
        "address", 'a', FLAG_STRING, "A", "where the daemons are: DIR, or DIR?cpu0,cpu1", &(to), \
        0,         0                                                                             \
    },                                                                                           \
    {                                                                                            \
        "runtime-dir", 'd', FLAG_STRING, "DIR", "the same", &(to), 0, 0                          \
    }
#define VERB_WHERE                                                                             \
    "where the daemons are: --address, else $SHARDD_ADDRESS, else your only `shardctl up` or " \
    "`run`\nthat goes on, else /run/shardd\n"

/* For a verb without further words. Returns -1 to go on, else the exit code. ret_rest: as
 * flags_parse() has it; NULL: a further word is an error. */
int verb_start(const struct flags *f, int argc, char **argv, int *ret_rest);

/* The same for a verb with words, before, between and behind the flags: they are in argv[1] and on,
 * *ret_count of them. Behind "--" there are words alone. */
int verb_start_words(const struct flags *f, int argc, char **argv, int *ret_count);

/* The same for a verb with one word. *ret_word: NULL when there is none; *ret_more: the first word
 * too many, or NULL. */
int verb_start_word(const struct flags *f, int argc, char **argv, const char **ret_word,
                    const char **ret_more);

/* `shardctl VERB --list-flags`, for completion and tests: " --name" or " --name:ARG" each, letters
 * likewise, on one line without an end. */
#define VERB_LIST_FLAGS "--list-flags"

/* `shardctl VERB --list-mdoc`: the flags as items of a list in mdoc(7), for the manual page. */
#define VERB_LIST_MDOC "--list-mdoc"

/* A whole file of at most bytes_max bytes, NUL behind it; the caller's to free. Errors: SHD_ENOENT,
 * SHD_ERANGE it has more, SHD_ENOMEM, SHD_EIO. */
int verb_file(const char *path, size_t bytes_max, char **ret_text, size_t *ret_bytes,
              struct shd_err *e);

/* Print what a verb answers with --json, as jansson's flags say, and release it. */
void verb_json(json_t *answer, size_t flags, FILE *out);

#endif
