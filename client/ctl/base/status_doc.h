/* A daemon's /status document (docs/status.md) as structs for showing.
 *
 * The document comes from outside: what is missing or of another type is "not known" (NAN, ""),
 * lists are cut at the limits below, texts are cleaned (text.h). Only what is no such
 * document at all is an error. Of a document without its long lists `units` is the count.
 */
#ifndef SHD_CTL_STATUS_DOC_H
#define SHD_CTL_STATUS_DOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"

#define DOC_MODELS_MAX   64u
#define DOC_SESSIONS_MAX 4096u
#define DOC_WAITS_MAX    1024u
#define DOC_ON_MAX       8u
#define DOC_NAME_BYTES   40u
#define DOC_WORD_BYTES   16u
#define DOC_TEXT_BYTES   240u

enum doc_memory { DOC_STATE, DOC_PUBLISH, DOC_INBOX, DOC_BOARD, DOC_LEDGER, DOC_SPILL, DOC_MEMORY };

enum doc_files { DOC_FILE_STATE, DOC_FILE_PUBLISH, DOC_FILE_SNAPSHOTS, DOC_FILES };

struct doc_model {
    char name[DOC_NAME_BYTES], phase[DOC_WORD_BYTES];
    char checkpoint[DOC_NAME_BYTES]; /* "writing step 12: 40 %"; "": none */
    char settings[DOC_TEXT_BYTES];   /* "lr_scale.decay=0.5 since step 10"; "": nothing is set */
    char differ[DOC_TEXT_BYTES];     /* the last two copies of a gradient that did; "": none */
    double compared, differences;    /* such pairs; NAN: none are verified */
    char stopped[DOC_TEXT_BYTES];    /* "norm 31000 is above 10 (norm_above)"; "": it is not */
    char skipped[DOC_TEXT_BYTES];    /* likewise, of the last decided step; "": it counts */
    double written, to_write;        /* bytes, of the checkpoint; NAN: none */
    double step, owner, owners, units, micro_batches;
    double expected, returned, waiting;
    double hold_step; /* NAN: it does not drain */
    double bytes[DOC_MEMORY];
    double files[DOC_FILES]; /* bytes on a disk; NAN: a build of before does not say */
    double steps_per_s, returns_per_s, bytes_per_s;
    double saved_step, saved_s; /* the last checkpoint and its age; NAN: none is known */
    double loss, norm;          /* of the last committed step; NAN: not known */
};

struct doc_now {
    char what[DOC_WORD_BYTES], unit[DOC_NAME_BYTES]; /* what: "" when it does not say */
    double micro, step, since_s;
};

struct doc_session {
    char name[DOC_NAME_BYTES], role[DOC_WORD_BYTES], state[DOC_WORD_BYTES], path[DOC_WORD_BYTES];
    double id, pid, uid, age_s, slots, slots_waiting;
    struct doc_now now; /* what it does */
};

struct doc_peer {
    double pid;
    char name[DOC_NAME_BYTES], state[DOC_WORD_BYTES];
};
struct doc_wait {
    struct doc_peer who; /* pid NAN: nobody in particular */
    char kind[DOC_WORD_BYTES], text[DOC_TEXT_BYTES];
    double since_s;
    struct doc_peer on[DOC_ON_MAX];
    uint32_t on_count;
};

struct doc {
    char device[DOC_NAME_BYTES], version[DOC_WORD_BYTES], isa[DOC_WORD_BYTES],
        keeper[DOC_WORD_BYTES];
    double schema, pid, uptime_s, threads, stale_ms;
    double read, to_read;         /* bytes, of what is being restored; NAN: nothing */
    struct doc_model *models;     /* owned */
    struct doc_session *sessions; /* owned */
    struct doc_wait *waits;       /* owned, as sent: the longest first */
    uint32_t model_count, session_count, wait_count;
    char refused[DOC_TEXT_BYTES]; /* a model that has failed or was not adopted; "": none */
    char error[DOC_TEXT_BYTES];   /* its last warning or error; "": none */
    char kernels[DOC_TEXT_BYTES]; /* "adamw bf16 avx2 (0.94 of avx512), ..."; "": none was timed */
};

/* The document in text[bytes]; *ret_json, when not NULL, is the caller's to release. Without
 * with_tools the sessions of administrators and of this process are left out of both.
 * Errors: SHD_EPROTO it is no JSON, or no status; SHD_ENOMEM. */
int doc_parse(const char *text, size_t bytes, bool with_tools, struct doc **ret_doc,
              json_t **ret_json, struct shd_err *e);
void doc_free(struct doc *d); /* NULL is a no-op */

/* Bytes of all models of d, and of each kind. */
double doc_bytes(const struct doc *d, double ret_kinds[DOC_MEMORY]);

/* The model of d that does most now; NULL: it has none. */
const struct doc_model *doc_main_model(const struct doc *d);

#endif
