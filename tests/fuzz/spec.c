/* A model's description as anybody may send it: what parses can be dumped, parses to the same
 * again, and its layout can be asked for. Input: the JSON. */
#include "proto/spec/spec_dump.h"
#include "proto/spec/spec_json.h"
#include "tests/fuzz/fuzz.h"

#include <stdlib.h>

#include "proto/spec/spec.h"
#include "tests/fuzz/mutate_json.h"

static void check_spec(const struct spec *s)
{
    uint64_t elems = 0;
    CHECK(s->unit_count >= 1 && s->unit_count <= SHD_UNITS_MAX);
    CHECK(s->group_count >= 1 && s->group_count <= SHD_GROUPS_MAX);
    CHECK(s->micro_batches >= 1 && s->micro_batches <= SHD_MICROS_MAX);
    CHECK(spec_returns(s) * s->accumulate == s->micro_batches && spec_moments(s) <= 2);
    for (uint32_t i = 0; i < s->tensor_count; i++) {
        const struct spec_tensor *t = &s->tensors[i];
        CHECK(t->unit < s->unit_count && t->group < s->group_count && t->rank <= SPEC_RANK_MAX);
        CHECK(t->elems > 0 && t->offset_elems + t->elems <= s->units[t->unit].elems);
        elems += t->elems;
        (void)spec_tensor_key(s, t);
    }
    CHECK(elems == s->elems && elems <= SHD_MODEL_ELEMS_MAX);
    for (uint32_t u = 0; u < s->unit_count; u++) {
        CHECK(s->units[u].elems % SHD_BLOCK_ELEMS == 0 && s->units[u].tensor_count > 0);
        for (uint32_t i = 0; i < s->units[u].uses_count; i++)
            CHECK(s->units[u].uses[i] < s->unit_count && s->units[u].uses[i] != u);
    }
}

/* Dumping makes the text canonical, and so longer than the limit now and then. */
static void round_trip(const struct spec *s)
{
    struct shd_err e = { 0 };
    struct spec *again;
    char *text, *text_again;
    const int r = spec_dump(s, &text, &e);
    if (r != SHD_OK) {
        CHECK(r == SHD_ERANGE);
        return;
    }
    CHECK(spec_parse(text, strlen(text), &again, &e) == SHD_OK);
    CHECK(spec_compare(s, again, &e) == SHD_OK && spec_compare(again, s, &e) == SHD_OK);
    CHECK(spec_dump(again, &text_again, &e) == SHD_OK && strcmp(text, text_again) == 0);
    check_spec(again);
    spec_free(again);
    free(text);
    free(text_again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    const int r = spec_parse((const char *)data, size, &spec, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return 0;
    }
    check_spec(spec);
    round_trip(spec);
    spec_free(spec);
    return 0;
}

static const char *const seeds[] = {
    "{\"name\":\"m\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},"
    "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"t\",\"shape\":[3]}]}]}",
    "{\"name\":\"gpt\",\"seed\":1,\"micro_batches\":4,\"accumulate\":2,\"publish\":\"bf16\","
    "\"optimizer\":{\"kind\":\"adamw\",\"beta1\":0.9,\"beta2\":0.95,\"eps\":1e-8},"
    "\"groups\":[{\"name\":\"decay\",\"weight_decay\":0.1},{\"name\":\"plain\",\"lr_scale\":2}],"
    "\"units\":[{\"name\":\"embed\",\"tensors\":[{\"name\":\"wte\",\"shape\":[256,128],"
    "\"group\":\"decay\",\"init\":[\"normal\",0,0.02]}]},"
    "{\"name\":\"h.0\",\"tensors\":[{\"name\":\"a\",\"shape\":[5000],\"group\":\"plain\","
    "\"trainable\":false}]},"
    "{\"name\":\"head\",\"uses\":[\"embed\"],\"tensors\":[{\"name\":\"ln_f\",\"shape\":[],"
    "\"group\":\"plain\",\"init\":[\"const\",1]},{\"name\":\"w\",\"shape\":[2,3,4],"
    "\"group\":\"decay\",\"init\":[\"uniform\",-1,1]}]}]}",
    "{\"name\":\"l\",\"micro_batches\":8,\"optimizer\":{\"kind\":\"lion\",\"beta1\":0.9},"
    "\"publish\":\"f16\",\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"t\","
    "\"shape\":[1048576,268435456]}]}]}",
};

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    if (index >= ARRAY_SIZE(seeds) || strlen(seeds[index]) > bytes_max)
        return 0;
    memcpy(buf, seeds[index], strlen(seeds[index]));
    return strlen(seeds[index]);
}

#ifdef SHD_FUZZ
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    return mutate_json(data, size, max, seed);
}
#endif
