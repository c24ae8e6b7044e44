/* The beginning of each verb: its flags are parsed, and help and errors are said. */
#ifndef SHD_CTL_VERB_START_H
#define SHD_CTL_VERB_START_H

#include "proto/base/flags.h"

/* For a verb without further words. Returns -1 to go on, else the exit code. ret_rest: as
 * flags_parse() has it; NULL: a further word is an error. */
int verb_start(const struct flags *f, int argc, char **argv, int *ret_rest);

/* The same for a verb with one word, in front of the flags or behind them. *ret_word: NULL when
 * there is none; *ret_more: the first word too many, or NULL. */
int verb_start_word(const struct flags *f, int argc, char **argv, const char **ret_word,
                    const char **ret_more);

/* `shardctl VERB --list-flags`, for completion and tests: " --name" or " --name:ARG" each, letters
 * likewise, on one line without an end. */
#define VERB_LIST_FLAGS "--list-flags"

/* `shardctl VERB --list-mdoc`: the flags as items of a list in mdoc(7), for the manual page. */
#define VERB_LIST_MDOC "--list-mdoc"

#endif
