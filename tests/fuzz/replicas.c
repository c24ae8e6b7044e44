/* What hosts with replicas read of each other's making: a view of the arbiter, and replicas.json,
 * whose devices are paired. What is taken is written to the same again. Input: which (1 byte), then
 * the JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/pairs.h"
#include "proto/files/arbiter_view.h"
#include "proto/files/replicas.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/json.h"

static void view_input(const char *json, size_t bytes)
{
    struct arbiter_view v = { 0 }, again = { 0 };
    struct shd_err e = { 0 };
    char *text = NULL;
    const int r = arbiter_view_parse(json, bytes, "c", &v, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        CHECK(v.out == NULL);
        return;
    }
    CHECK(v.number >= 1 && v.number <= ARBITER_NUMBER_MAX && v.out_count <= ARBITER_HOSTS_MAX);
    for (uint32_t i = 0; i < v.out_count; i++) {
        CHECK(arbiter_name_is_one(v.out[i]) && arbiter_view_has(&v, v.out[i]));
        CHECK(i == 0 || strcmp(v.out[i - 1], v.out[i]) < 0);
    }
    CHECK(arbiter_view_write(&v, "c", &text, &e) == SHD_OK && strlen(text) <= ARBITER_TEXT_MAX);
    CHECK(arbiter_view_parse(text, strlen(text), "c", &again, &e) == SHD_OK);
    CHECK(again.number == v.number && again.out_count == v.out_count);
    CHECK(v.out_count == 0 || memcmp(again.out, v.out, v.out_count * sizeof *v.out) == 0);
    free(text);
    arbiter_view_free(&again);
    arbiter_view_free(&v);
}

static void check_pairs(const struct replicas *r)
{
    static char address[DEVICES_ADDRESS_BYTES(8)];
    struct pairs p = { 0 };
    struct shd_err e = { 0 };
    const int code = pairs_make(r, &p, &e);
    if (code != SHD_OK) {
        fuzz_check_refusal(code, &e);
        return;
    }
    CHECK(2 * p.count == r->device_count);
    for (uint32_t i = 0; i < p.count; i++) {
        const struct pair *pair = &p.pairs[i];
        CHECK(replicas_host_of(r, pair->primary) == &r->hosts[pair->primary_host]);
        CHECK(replicas_host_of(r, pair->secondary) == &r->hosts[pair->secondary_host]);
        CHECK(pair->primary_host != pair->secondary_host);
    }
    pairs_address(&p, "/d", address, sizeof address);
    pairs_free(&p);
}

static void file_input(const char *json, size_t bytes)
{
    struct replicas r = { 0 };
    struct shd_err e = { 0 };
    const int code = replicas_parse(json, bytes, &r, &e);
    if (code != SHD_OK) {
        fuzz_check_refusal(code, &e);
        CHECK(r.hosts == NULL && r.arbiter == NULL);
        return;
    }
    CHECK(r.host_count >= 1 && r.host_count <= CLUSTER_HOSTS_MAX);
    CHECK(r.device_count >= r.host_count && r.device_count <= REPLICAS_DEVICES_MAX);
    CHECK(arbiter_name_is_one(r.cluster));
    check_pairs(&r);
    replicas_free(&r);
}

static int replicas_input(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    char *json = malloc(size); /* exactly, so that a checker sees every byte past its end */
    CHECK(json != NULL);
    memcpy(json, data + 1, size - 1);
    ((data[0] & 1) != 0 ? view_input : file_input)(json, size - 1);
    free(json);
    return 0;
}

static size_t replicas_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const char *const seeds[] = {
        "1{\"schema\":1,\"cluster\":\"c\",\"view\":1,\"out\":[]}",
        "1{\"schema\":1,\"cluster\":\"c\",\"view\":9007199254740992,\"out\":[\"a\",\"b-2.x\"]}",
        "0{\"schema\":1,\"arbiter\":\"file:/x\",\"cluster\":\"c\",\"hosts\":[{\"name\":\"a\","
        "\"devices\":[\"cpu0\",\"cpu1\"]},{\"name\":\"b\",\"devices\":[\"cpu3\",\"cpu2\"]}]}",
        "0{\"schema\":1,\"arbiter\":\"etcd:http://x:1/y\",\"cluster\":\"c\",\"hosts\":[{\"name\":"
        "\"a\",\"devices\":[\"cpu0\",\"cpu9\",\"cpu10\"]},{\"name\":\"b\",\"devices\":[\"gpu0\"]},"
        "{\"name\":\"c\",\"devices\":[\"cpu2\"]},{\"name\":\"d\",\"devices\":[\"cpu01\"]}]}",
    };
    if (index >= ARRAY_SIZE(seeds) || strlen(seeds[index]) > bytes_max)
        return 0;
    memcpy(buf, seeds[index], strlen(seeds[index]));
    return strlen(seeds[index]);
}

static size_t replicas_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    if (size < 2 || seed % 64 == 0)
        return fuzz_mutate(data, size, max);
    return 1 + mutate_json(data + 1, size - 1, max - 1, seed);
}

const struct fuzz_target fuzz_replicas = { "replicas", replicas_input, replicas_seed,
                                           replicas_mutate };
