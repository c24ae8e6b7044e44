/* See scale.h: what its parts share. */
#include "bench/scale.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"

#define UNIT_BYTES 120u

char *scale_spec(uint32_t units, uint64_t elems, uint32_t micro_batches)
{
    const size_t bytes = (size_t)units * UNIT_BYTES + 300;
    char *json = malloc(bytes);
    if (json == NULL)
        return NULL;
    int at = snprintf(json, bytes,
                      "{\"name\":\"scale\",\"micro_batches\":%" PRIu32
                      ",\"grad_dtype\":\"bf16\",\"optimizer\":{\"kind\":\"adamw\"},\"units\":[",
                      micro_batches);
    for (uint32_t u = 0; u < units; u++)
        at += snprintf(json + at, bytes - (size_t)at,
                       "%s{\"name\":\"u%" PRIu32 "\",\"tensors\":[{\"name\":\"t%" PRIu32
                       "\",\"shape\":[%" PRIu64 "]}]}",
                       u > 0 ? "," : "", u, u, elems);
    snprintf(json + at, bytes - (size_t)at, "]}");
    return json;
}

int scale_init(struct scale *s, const char *spec_json, struct shd_err *e)
{
    const uint32_t owners = scale_owners(s);
    int r = spec_parse(spec_json, strlen(spec_json), &s->spec, e);
    if (r != SHD_OK)
        return r;
    s->maps = sys_calloc(owners, sizeof(struct shardmap *));
    if (s->maps == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " owners", owners);
    for (uint32_t i = 0; r == SHD_OK && i < owners; i++)
        r = shardmap_new(s->spec, i, owners, &s->maps[i], e);
    return r;
}

void scale_deinit(struct scale *s)
{
    for (uint32_t i = 0; s->maps != NULL && i < scale_owners(s); i++)
        shardmap_free(s->maps[i]);
    free(s->maps);
    spec_free(s->spec);
}

void scale_pack(const struct wire_request *request, struct scale_frame *ret_frame)
{
    struct shd_err e;
    CHECK(wire_request_pack(request, ret_frame->bytes, sizeof ret_frame->bytes, &ret_frame->used,
                            &e) == SHD_OK);
}

struct wire_request scale_return(uint64_t step, uint32_t micro, uint32_t unit)
{
    struct wire_request r = { .type = WIRE_RETURN };
    r.return_grad = (struct wire_return){ .model = 1,
                                          .step = step,
                                          .micro = micro,
                                          .unit = unit,
                                          .slot = unit % 2,
                                          .dtype = SHD_BF16,
                                          .metrics = { 2.5 },
                                          .metric_count = 1,
                                          .attempt = 1,
                                          .metric_names = "loss" };
    return r;
}

struct wire_request scale_prepare(uint64_t step)
{
    struct wire_request r = { .type = WIRE_PREPARE };
    r.prepare = (struct wire_prepare){ .model = 1, .step = step, .attempt = 1 };
    return r;
}

struct wire_request scale_commit(uint64_t step, const struct decision *decision)
{
    struct wire_request r = { .type = WIRE_COMMIT };
    r.commit = (struct wire_commit){
        .model = 1, .step = step, .decision = *decision, .norm = 1.5, .attempt = 1
    };
    return r;
}

uint64_t scale_cpu_ns(void)
{
    struct timespec t;
    CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}
