/* See digest.h. */
#include "client/paths/digest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/wire/wire.h"

#define HEADER "shardd digest 1\n"

int digest_stamp_take(struct digest_stamp *stamp, uint64_t step, uint64_t updates,
                      struct shd_err *e)
{
    if (!stamp->set)
        *stamp = (struct digest_stamp){ true, step, updates };
    if (stamp->step != step || stamp->updates != updates)
        return err_set(e, SHD_ESTEP,
                       "model moved from step %" PRIu64 " to %" PRIu64
                       " while its digest was taken",
                       stamp->step, step);
    return SHD_OK;
}

/* -- Little-endian into the hash; failures are sticky and looked at once, at the end ----------- */

struct root {
    EVP_MD_CTX *ctx; /* owned */
    bool failed;
};

static void put_bytes(struct root *root, const void *data, size_t bytes)
{
    if (EVP_DigestUpdate(root->ctx, data, bytes) != 1)
        root->failed = true;
}

static void put_number(struct root *root, uint64_t x, size_t bytes)
{
    uint8_t raw[8];
    for (size_t i = 0; i < bytes; i++)
        raw[i] = (uint8_t)(x >> (8 * i));
    put_bytes(root, raw, bytes);
}

static void put_header(struct root *root, const struct digest_stamp *stamp)
{
    put_bytes(root, HEADER, strlen(HEADER));
    put_number(root, stamp->step, 8);
    put_number(root, stamp->updates, 8);
}

static void put_tensor(struct root *root, const struct spec_tensor *tensor)
{
    put_bytes(root, tensor->name, strlen(tensor->name) + 1);
    put_number(root, tensor->rank, 4);
    for (uint32_t d = 0; d < tensor->rank; d++)
        put_number(root, tensor->shape[d], 8);
}

/* -- Walking ----------------------------------------------------------------------------------- */

struct walk {
    const struct spec *spec;
    const struct digest_source *source;
    uint8_t (*window)[DIGEST_LEAF_BYTES]; /* owned, [window_leaves] */
    struct digest_stamp stamp;
    struct root root;
};

/* The header needs the step, which comes with the first leaves. */
static int take_part(struct walk *w, const struct digest_part *part, struct shd_err *e)
{
    const bool opening = !w->stamp.set;
    const int r = w->source->leaves(w->source->ctx, part, w->window, &w->stamp, e);
    if (r != SHD_OK)
        return r;
    CHECK(w->stamp.set);
    if (opening)
        put_header(&w->root, &w->stamp);
    return SHD_OK;
}

static uint32_t array_count(const struct spec *spec, uint32_t tensor)
{
    return spec_unit_arrays(spec, spec->tensors[tensor].unit);
}

/* How many tensors from the first on one part can have; 0: not even that one. */
static uint32_t range_of(const struct walk *w, uint32_t first, uint64_t *ret_leaves)
{
    const struct spec *spec = w->spec;
    uint32_t count = 0, units = 0;
    uint64_t others = 0, from = 0, own = 0; /* elements: of earlier units, in this one */
    *ret_leaves = 0;
    for (uint32_t i = first; i < spec->tensor_count; i++, count++) {
        const struct spec_tensor *t = &spec->tensors[i];
        if (i == first || t->unit != t[-1].unit) {
            units++;
            others += own;
            from = t->offset_elems;
        }
        own = t->offset_elems + t->elems - from;
        const uint64_t leaves = array_count(spec, i) * ckpt_leaf_count(t);
        if (units > w->source->units_max || *ret_leaves + leaves > WIRE_LEAVES_MAX ||
            others + own > WIRE_RANGE_ELEMS_MAX)
            break;
        *ret_leaves += leaves;
    }
    return count;
}

static int walk_range(struct walk *w, uint32_t first, uint32_t count, uint64_t leaves,
                      struct shd_err *e)
{
    const struct digest_part part = { .tensor = first, .tensors = count, .leaves = leaves };
    uint64_t at = 0;
    const int r = take_part(w, &part, e);
    for (uint32_t i = first; r == SHD_OK && i < first + count; i++) {
        const uint64_t own = array_count(w->spec, i) * ckpt_leaf_count(&w->spec->tensors[i]);
        put_tensor(&w->root, &w->spec->tensors[i]);
        put_bytes(&w->root, w->window + at, own * DIGEST_LEAF_BYTES);
        at += own;
    }
    return r;
}

static int walk_array(struct walk *w, uint32_t tensor, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &w->spec->tensors[tensor];
    const uint64_t total = ckpt_leaf_count(t);
    for (uint64_t first = 0; first < total; first += DIGEST_WINDOW_LEAVES) {
        const uint64_t left = total - first;
        const uint64_t leaves = left < DIGEST_WINDOW_LEAVES ? left : DIGEST_WINDOW_LEAVES;
        const struct digest_part part = {
            .tensor = tensor, .array = array, .first_leaf = first, .leaves = leaves
        };
        const int r = take_part(w, &part, e);
        if (r != SHD_OK)
            return r;
        if (array == 0 && first == 0)
            put_tensor(&w->root, t);
        put_bytes(&w->root, w->window, leaves * DIGEST_LEAF_BYTES);
    }
    return SHD_OK;
}

static int walk_tensors(struct walk *w, struct shd_err *e)
{
    if (EVP_DigestInit_ex(w->root.ctx, EVP_sha256(), NULL) != 1)
        w->root.failed = true;
    int r = SHD_OK;
    for (uint32_t t = 0, next; r == SHD_OK && t < w->spec->tensor_count; t = next) {
        uint64_t leaves = 0;
        const uint32_t count = range_of(w, t, &leaves);
        next = count > 0 ? t + count : t + 1;
        if (count > 0)
            r = walk_range(w, t, count, leaves, e);
        for (uint32_t a = 0; r == SHD_OK && count == 0 && a < array_count(w->spec, t); a++)
            r = walk_array(w, t, a, e);
    }
    return r;
}

static int finish_root(struct root *root, char *ret_hex, struct shd_err *e)
{
    uint8_t sha[DIGEST_LEAF_BYTES];
    unsigned bytes = 0;
    if (EVP_DigestFinal_ex(root->ctx, sha, &bytes) != 1 || bytes != sizeof sha || root->failed)
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    for (size_t i = 0; i < sizeof sha; i++)
        snprintf(ret_hex + 2 * i, 3, "%02x", sha[i]);
    return SHD_OK;
}

static uint64_t window_leaves(const struct spec *spec, bool ranges)
{
    uint64_t leaves_max = ranges ? WIRE_LEAVES_MAX : 1;
    for (uint32_t t = 0; t < spec->tensor_count; t++) {
        const uint64_t leaves = ckpt_leaf_count(&spec->tensors[t]);
        if (leaves > leaves_max)
            leaves_max = leaves;
    }
    return leaves_max < DIGEST_WINDOW_LEAVES ? leaves_max : DIGEST_WINDOW_LEAVES;
}

int digest_run(const struct spec *spec, const struct digest_source *source,
               char ret_hex[DIGEST_HEX_BYTES], uint64_t *ret_step, struct shd_err *e)
{
    CHECK(spec->tensor_count > 0);
    struct walk w = {
        .spec = spec,
        .source = source,
        .window = sys_malloc(window_leaves(spec, source->units_max > 0) * DIGEST_LEAF_BYTES),
        .root.ctx = EVP_MD_CTX_new(),
    };
    int r;
    if (w.window == NULL || w.root.ctx == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory for a digest");
    else
        r = walk_tensors(&w, e);
    if (r == SHD_OK)
        r = finish_root(&w.root, ret_hex, e);
    if (r == SHD_OK)
        *ret_step = w.stamp.step;
    EVP_MD_CTX_free(w.root.ctx);
    free(w.window);
    return r;
}
