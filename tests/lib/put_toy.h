/* Shared by test_client_put.c and test_client_put_kill.c: a toy model, and values that are put. */
#ifndef SHD_TESTS_PUT_TOY_H
#define SHD_TESTS_PUT_TOY_H

#include "tests/lib/client_remote.h"

#define PUT_UPDATES 41u /* more than there are steps */

/* Of embed and h0 others; what is said of the frozen tower does not count. */
extern const uint64_t put_updates[PT_UNITS];

extern const struct pt_model put_pt;
extern const uint8_t some_arrays[PT_UNITS];

struct values {
    const shd_model *m;
    uint64_t salt;
    int fail_at; /* this call gives up; -1: none */
    int calls;
    int lose_at, daemon; /* in this call a daemon is restarted; -1: none */
};

struct values values_of(const shd_model *m, uint64_t salt);

/* What is put there: for any element, also those of gaps, which are the library's to zero. */
float value_of(uint64_t salt, uint32_t unit, uint32_t array, uint64_t i);

/* shd_put_options.fill; ctx: struct values. */
int fill_values(void *ctx, uint32_t unit, enum shd_array array, float *values);

int put_some(shd_model *m, struct values *v, bool *ret_counts, struct shd_err *e);

void put_ok(shd_model *m, uint64_t salt);

shd_model *open_pt(shd_session *s);

/* What was put is there, in all bits, with zeros between the tensors. */
void expect_put(shd_model *m, uint64_t salt);

/* So many steps, a put, and `rest` steps more, in this process. */
void put_reference(uint32_t before, bool put, uint32_t rest, char hex[65]);

/* Gradients of ones, of all units that have any. */
void return_all(shd_model *m, uint32_t micro);

#endif
