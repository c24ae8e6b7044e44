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
    digest_leaves_fn leaves;
    void *ctx;
    uint8_t (*window)[DIGEST_LEAF_BYTES]; /* owned, [window_leaves] */
    struct digest_stamp stamp;
    struct root root;
};

/* The header needs the step, which comes with the first leaves. */
static int walk_array(struct walk *w, uint32_t tensor, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &w->spec->tensors[tensor];
    const uint64_t total = ckpt_leaf_count(t);
    for (uint64_t first = 0; first < total; first += DIGEST_WINDOW_LEAVES) {
        const uint64_t left = total - first;
        const uint64_t leaves = left < DIGEST_WINDOW_LEAVES ? left : DIGEST_WINDOW_LEAVES;
        const struct digest_part part = { tensor, array, first, leaves };
        const bool opening = !w->stamp.set;
        const int r = w->leaves(w->ctx, &part, w->window, &w->stamp, e);
        if (r != SHD_OK)
            return r;
        CHECK(w->stamp.set);
        if (opening)
            put_header(&w->root, &w->stamp);
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
    for (uint32_t t = 0; t < w->spec->tensor_count; t++) {
        const uint32_t arrays = 1 + spec_unit_moments(w->spec, w->spec->tensors[t].unit);
        for (uint32_t a = 0; a < arrays; a++) {
            const int r = walk_array(w, t, a, e);
            if (r != SHD_OK)
                return r;
        }
    }
    return SHD_OK;
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

static uint64_t window_leaves(const struct spec *spec)
{
    uint64_t leaves_max = 1;
    for (uint32_t t = 0; t < spec->tensor_count; t++) {
        const uint64_t leaves = ckpt_leaf_count(&spec->tensors[t]);
        if (leaves > leaves_max)
            leaves_max = leaves;
    }
    return leaves_max < DIGEST_WINDOW_LEAVES ? leaves_max : DIGEST_WINDOW_LEAVES;
}

int digest_run(const struct spec *spec, digest_leaves_fn leaves, void *ctx,
               char ret_hex[DIGEST_HEX_BYTES], uint64_t *ret_step, struct shd_err *e)
{
    CHECK(spec->tensor_count > 0);
    struct walk w = {
        .spec = spec,
        .leaves = leaves,
        .ctx = ctx,
        .window = sys_malloc(window_leaves(spec) * DIGEST_LEAF_BYTES),
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
