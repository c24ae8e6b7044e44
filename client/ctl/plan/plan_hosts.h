/* What of a step crosses between hosts, of a model whose owners and workers are on several: by the
 * sizes that the owners lay their memory out by. What it does not have are requests and replies,
 * some hundred bytes each, and what TLS adds. */
#ifndef SHD_CTL_PLAN_HOSTS_H
#define SHD_CTL_PLAN_HOSTS_H

#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_copies.h"
#include "client/ctl/plan/plan_source.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

struct plan_hosts {
    struct plan_host items[FLAG_LIST_MAX];
    uint32_t count; /* 0: all on one */
    struct plan_copies copies;
};
void plan_hosts_free(struct plan_hosts *hosts); /* leaves it empty */

/* "NAME:DAEMONS:WORKERS" of each host, in the order of the owners and of the ranks; daemons and
 * workers of ask become their sums, daemons half of it with replicas. Errors: SHD_EINVAL names the
 * word or the flag. */
int plan_hosts_parse(struct plan_ask *ask, struct plan_hosts *ret_hosts, struct shd_err *e);

struct plan_crossing {
    uint64_t parameters_bytes; /* published, to mirrors: once, however many workers there are */
    uint64_t gradients_bytes;  /* of each group of each worker there */
};

/* From host `from` to host `to` in a step. Errors: SHD_ENOMEM, SHD_ERANGE. */
int plan_crossing(const struct spec *spec, const struct plan_ask *ask,
                  const struct plan_hosts *hosts, uint32_t from, uint32_t to,
                  struct plan_crossing *ret_crossing, struct shd_err *e);

/* Nothing where there are no hosts. */
int plan_hosts_print(const struct spec *spec, const struct plan_ask *ask,
                     const struct plan_hosts *hosts, FILE *out, struct shd_err *e);
/* An array of what crosses from where to where. */
int plan_hosts_json(const struct spec *spec, const struct plan_ask *ask,
                    const struct plan_hosts *hosts, json_t **ret_json, struct shd_err *e);

#endif
