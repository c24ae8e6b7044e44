/* The configuration of another training tool, answered knob by knob: what it sets here, what is
 * always so, what the training script says instead, what there is no need for, and what is refused.
 * No knob is passed over: one that is not known is refused by name. */
#ifndef SHD_CTL_PLAN_PEER_CONFIG_H
#define SHD_CTL_PLAN_PEER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "proto/base/status.h"

enum peer_verdict {
    PEER_SETS,     /* the text is the flag of `shardctl plan` */
    PEER_SAME,     /* always so */
    PEER_SCRIPT,   /* the training script says it, and goes on to */
    PEER_NEEDLESS, /* tunes what there is not, or what is fixed */
    PEER_OFF,      /* turned off in the configuration */
    PEER_REFUSED,
};

struct peer_answer {
    char knob[96];  /* path of keys with dots between */
    char value[40]; /* as JSON, cut */
    char text[200];
    enum peer_verdict verdict;
};

/* What a configuration said that only together makes a policy. */
struct peer_sizes {
    uint64_t step_batch, micro_batch, accumulate; /* samples, samples, micro-batches; 0: not said */
    uint64_t live_elems;
};

struct peer_config {
    const char *tool, *from; /* borrowed: "DeepSpeed", the file or the words */
    struct plan_ask *ask;    /* borrowed: takes what is set */
    struct peer_sizes sizes;
    struct peer_answer *answers; /* owned, [count] */
    size_t count, refused;
};

/* A knob of a peer. `take` sets what its value asks for and may change the answer, which has the
 * verdict and text of the table. NULL: it sets nothing. */
struct peer_knob {
    const char *path; /* "optimizer.params.lr"; ".*" at the end: with all that is below it */
    enum peer_verdict verdict;
    const char *text;
    void (*take)(struct peer_config *c, const json_t *value, struct peer_answer *a);
};

struct peer_table {
    const char *tool;
    const struct peer_knob *knobs;
    size_t count;
    const char *prefix; /* that a knob's last key may have and that says nothing, or NULL */
    bool has_words;     /* instead of a file the keys may be given, as words */
};

/* Answer file `from` in JSON, or the words that it is ("full_shard auto_wrap offload"), and set in
 * *ask what it asks for. A configuration with refused knobs is a success: ret_config->refused
 * counts them. Errors: SHD_EINVAL it is no such thing; SHD_ENOENT, SHD_ERANGE, SHD_EIO of the file,
 * SHD_ENOMEM. peer_free() in any case. */
int peer_read(const struct peer_table *table, const char *from, struct plan_ask *ask,
              struct peer_config *ret_config, struct shd_err *e);
void peer_free(struct peer_config *c);

void peer_print(const struct peer_config *c, FILE *out);
json_t *peer_json(const struct peer_config *c); /* NULL: no memory */

/* Answer with another verdict or text, for take(). */
void peer_say(struct peer_answer *a, enum peer_verdict verdict, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Not false, null, 0, "none", "no" or "": the knob turns something on. */
bool peer_is_on(const json_t *value);

#endif
