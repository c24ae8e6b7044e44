/* shardd.json: the part of a checkpoint that is no tensor. */
#ifndef SHD_CKPT_INFO_H
#define SHD_CKPT_INFO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/decision.h"

struct shd_err;

#define CKPT_INFO         "shardd.json"
#define CKPT_FORMAT       1
#define CKPT_FORMAT_UNITS 2 /* has updates of units, which a build that reads 1 would leave out */
#define CKPT_FORMAT_SET   3 /* has settings, likewise; and those, where there are any */
#define CKPT_FORMAT_RULES \
    4 /* its spec has an average, or its last step a guard skipped; and those two */
#define CKPT_FORMAT_CHOSEN \
    5 /* micro_batches or eps are set, or what waits for several steps; and those three */

struct ckpt_info {
    uint64_t step, updates;
    uint64_t *unit_updates; /* owned, [unit_count]; NULL: `updates` of each */
    uint32_t unit_count;    /* those of the spec; 0: NULL */
    char digest[65];
    char *spec_json; /* owned: canonical */
    bool has_decision;
    struct decision decision; /* of the step before */
    uint8_t *blob;            /* owned; NULL: none */
    size_t blob_bytes;
    char *settings_json; /* owned: as settings_json() has it; NULL: nothing is set */
    uint64_t bytes;      /* of all files */
    int64_t time;        /* seconds since 1970 */
    char version[32];
    bool summed; /* read: its checksum was there and right; else written by a build without */
};

struct ckpt_file {
    const char *name;
    uint64_t bytes;
};

/* As JSON text with a checksum over itself; the caller's to free. Errors: SHD_ENOMEM. */
int ckpt_info_dump(const struct ckpt_info *info, const struct ckpt_file *files, uint32_t count,
                   char **ret_json, struct shd_err *e);

/* Read shardd.json of the checkpoint in dir_fd and compare the files' sizes. Errors name what is
 * wrong: SHD_ENOENT no checkpoint, SHD_ENOTSUP another format, SHD_EINVAL. */
int ckpt_info_read(int dir_fd, struct ckpt_info *ret_info, struct shd_err *e);
void ckpt_info_deinit(struct ckpt_info *info);

#endif
