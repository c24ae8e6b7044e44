/* SHA-256 of the pieces of a slice: leaves of the state digest. Bytes are the fp32 values as they
 * lie in memory (little-endian). libcrypto picks the instructions; the result is SHA-256's. */
#include "kernels/cpu/cpu.h"
#include "proto/base/check.h"

uint64_t kern_hash_leaves(uint64_t head_elems, uint64_t elems)
{
    if (elems <= head_elems)
        return 1;
    return 1 + (elems - head_elems + SHD_BLOCK_ELEMS - 1) / SHD_BLOCK_ELEMS;
}

/* Elements of leaf `leaf`. */
static struct cpu_range leaf_range(const struct kern_hash *a, uint64_t leaf)
{
    const uint64_t first = leaf == 0 ? 0 : a->head_elems + (leaf - 1) * SHD_BLOCK_ELEMS;
    const uint64_t full = leaf == 0 ? a->head_elems : SHD_BLOCK_ELEMS;
    CHECK(first < a->elems);
    return (struct cpu_range){ first, full < a->elems - first ? full : a->elems - first };
}

int hash_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range leaves)
{
    const struct kern_hash *a = &op->u.hash;
    for (uint64_t leaf = leaves.first; leaf < leaves.first + leaves.count; leaf++) {
        const struct cpu_range r = leaf_range(a, leaf);
        if (EVP_DigestInit_ex2(t->digest, NULL, NULL) != 1 ||
            EVP_DigestUpdate(t->digest, a->x + r.first, r.count * sizeof *a->x) != 1 ||
            EVP_DigestFinal_ex(t->digest, a->out[leaf], NULL) != 1)
            return SHD_EINTERNAL;
    }
    return SHD_OK;
}
