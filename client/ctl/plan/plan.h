/* shardctl plan, in parts: where the model comes from, the figures, the drawing. */
#ifndef SHD_CTL_PLAN_H
#define SHD_CTL_PLAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "client/plan/plan.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* What the flags ask for; strings are borrowed from argv. */
struct plan_ask {
    const char *address, *model;     /* an open model */
    const char *spec, *safetensors;  /* or a file */
    const char *wrap, *tie, *frozen; /* how a safetensors file becomes units; NULL: not given */
    uint32_t unit_elems_min;
    const char *param_dtype; /* NULL: as the source has it */
    uint32_t accumulate;     /* 0: as the source has it */
    uint32_t micros;         /* per worker and step; 0: the model's, spread over the workers */
    uint32_t workers, daemons;
    struct plan_policy policy;
    uint64_t device_bytes, activation_bytes;
    bool offload;
    bool timeline_only;
};

/* The model as asked for: what --param-dtype and --accumulate change is changed, micros is filled
 * in. Errors name the file or flag. */
int plan_source(struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

/* The spec in a safetensors file's header: its tensors wrapped into units. The file is not
 * trusted. */
int plan_safetensors(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

/* A whole file of at most bytes_max bytes, NUL behind it; the caller's to free. */
int plan_read_file(const char *path, size_t bytes_max, char **ret_text, size_t *ret_bytes,
                   struct shd_err *e);

/* -- Drawing --------------------------------------------------------------------------------- */

/* A plan laid out in columns: a fetch, a return and a forward take one each, a backward two;
 * fetches and returns share one link, in the order in which they are issued. */
struct timeline {
    struct timeline_mark *marks; /* owned */
    uint32_t mark_count;
    uint32_t *micro_start;  /* owned, [micros + 1]: first column of each; the last is the end */
    uint32_t *held, *grads; /* owned, [columns] */
    uint32_t columns;
    uint32_t idle; /* columns in which compute waits for a fetch */
};
int timeline_new(const struct plan *plan, const struct spec *spec, struct timeline *ret_timeline,
                 struct shd_err *e);
void timeline_deinit(struct timeline *t);
void timeline_draw(const struct timeline *t, const struct plan *plan, const struct spec *spec,
                   FILE *out);

/* -- Figures --------------------------------------------------------------------------------- */

#define PLAN_TEXT_BYTES 40u

/* "1.5 MiB", "12 B". Returns buf. */
const char *plan_bytes_text(uint64_t bytes, char buf[PLAN_TEXT_BYTES]);

struct plan_owners {
    uint64_t state_bytes_max, publish_bytes_max; /* of the daemon that holds most */
    uint64_t total_bytes;                        /* of all, both */
};
int plan_owners(const struct spec *spec, uint32_t daemons, struct plan_owners *ret_owners,
                struct shd_err *e);

int plan_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
               FILE *out, struct shd_err *e);
int plan_print_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    json_t *automatic, FILE *out, struct shd_err *e);
json_t *plan_json_policy(const struct plan_policy *p);
json_t *plan_json_cost(const struct plan_cost *c);
json_t *plan_json_model(const struct spec *spec);

/* All strategies side by side. */
int plan_compare(const struct spec *spec, const struct plan_ask *ask, bool as_json, FILE *out,
                 struct shd_err *e);

/* Choose ask->policy for ask->device_bytes by the usual decision tree and say why on out (NULL:
 * do not). *ret_json, when ret_json is not NULL, tells the same. SHD_ERANGE: nothing fits; the
 * text has the numbers. */
int plan_auto(const struct spec *spec, struct plan_ask *ask, FILE *out, json_t **ret_json,
              struct shd_err *e);

#endif
