/* Quotas: how much of this daemon's memory a model may take, and all models together that a user,
 * or the users of a group, have made.
 *
 * Happy path: each piece of memory of a model is asked for here before it is made, by whichever
 * thread makes it, and given back once it is closed. One lock makes looking and counting one: of
 * two that ask for the same room one is refused. Who made a model its ledger says, so it counts for
 * the same user in a successor, and however it was opened since.
 *
 * Counted: state, ledger, published parameters and what is shared beside them, gradient slots of
 * all sessions, snapshots, pins, puts, what is spilled, and what is kept spare for a successor. A
 * fork is a model, of who forks.
 *
 * Failure: SHD_ENOMEM, with model, what for, asked, used, limit and whose it is. What a predecessor
 * has left is counted and never refused, nor is what is spilled: without it training would stop.
 *
 * Any thread. */
#ifndef SHD_DAEMON_QUOTA_H
#define SHD_DAEMON_QUOTA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#define QUOTA_RULES_MAX 64u
#define QUOTA_WHO_BYTES 48u
#define QUOTA_SHOWN_MAX 128u

enum quota_of { QUOTA_MODEL, QUOTA_UID, QUOTA_GID };

struct quota_rule {
    enum quota_of of;
    bool each; /* of its kind that has no rule of its own; of models always */
    uint32_t id;
    uint64_t bytes;
    char who[QUOTA_WHO_BYTES]; /* as it was given: "gid:team" */
};

struct quota_config { /* what the command line says; zeroed: no limits */
    struct quota_rule rules[QUOTA_RULES_MAX];
    uint32_t count;
};

/* Add "uid:1000=8GiB": a user's, by number or name; "gid:team=64GiB": of all whose first group that
 * is; "uid:*=", "gid:*=": of each one that has no rule of its own. And of each model. Errors:
 * SHD_EINVAL, SHD_ERANGE name the text, and what would be right. */
int quota_parse(const char *text, struct quota_config *config, struct shd_err *e);
void quota_models(uint64_t bytes, struct quota_config *config);

struct quota_maker { /* of a model */
    bool known;      /* no: a build of before has made it, and it counts for nobody */
    uint32_t uid, gid;
};

struct quota;
struct quota_use; /* of a model */

/* Errors: SHD_ENOMEM. */
int quota_new(const struct quota_config *config, struct quota **ret_quota, struct shd_err *e);
void quota_free(struct quota *q); /* NULL is a no-op; no model is left */

/* A model takes part from here on; at its end all it took is given back. Errors: SHD_ENOMEM. */
int quota_begin(struct quota *q, const struct quota_maker *maker, const char *name,
                struct quota_use **ret_use, struct shd_err *e);
void quota_end(struct quota_use *use); /* NULL is a no-op */

/* One more who may outlive the model with what it has taken, and ends it, too. */
struct quota_use *quota_ref(struct quota_use *use);

/* bytes more, for `what` ("a pin"): nothing was counted unless SHD_OK. */
int quota_take(struct quota_use *use, uint64_t bytes, const char *what, struct shd_err *e);
void quota_have(struct quota_use *use, uint64_t bytes); /* they are there, whatever is allowed */
void quota_give(struct quota_use *use, uint64_t bytes);
void quota_settle(struct quota_use *use, uint64_t asked, uint64_t got); /* what came of it */

uint64_t quota_used(const struct quota_use *use);
struct quota_maker quota_maker_of(const struct quota_use *use);

struct quota_shown {
    char who[QUOTA_WHO_BYTES];
    uint64_t used, limit; /* of models: used by the one that has most */
};
/* Each limit that somebody is under, or has been given by name. How many. */
uint32_t quota_show(struct quota *q, struct quota_shown ret_shown[QUOTA_SHOWN_MAX]);

#endif
