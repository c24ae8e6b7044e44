/* The files of a checkpoint before anything is in them: whole tensors in spec order, split by unit
 * (with all its tiles) into files of bounded size; and what is computed from them at the end. */
#ifndef SHD_CHECKPOINT_FILES_H
#define SHD_CHECKPOINT_FILES_H

#include <stdint.h>
#include <sys/types.h>

#include "client/paths/digest.h"
#include "proto/base/status.h"
#include "proto/files/ckpt_info.h"
#include "proto/spec/spec.h"

/* Tensor bytes of a file, at most, unless one unit has more. A test makes it small. */
extern uint64_t checkpoint_file_bytes_max;

struct checkpoint_files {
    struct ckpt_file *items; /* owned, [count]; names owned */
    uint32_t count;
    uint64_t bytes;
};

/* Make all files of a model of this spec in dir_fd, at full size, with their headers; leaves.bin
 * too. uid: as checkpoint_dir_lock(). Errors: SHD_EIO, no room among them; SHD_ENOMEM. */
int checkpoint_files_make(struct checkpoint_files *files, int dir_fd, const struct spec *spec,
                          uid_t uid, struct shd_err *e);
void checkpoint_files_deinit(struct checkpoint_files *files);

/* Sync them: sizes and headers are ours, the owners have synced the rest. */
int checkpoint_files_sync(const struct checkpoint_files *files, int dir_fd, struct shd_err *e);

/* The digest from leaves.bin. */
int checkpoint_files_digest(int dir_fd, const struct spec *spec, uint64_t step, uint64_t updates,
                            char ret_hex[DIGEST_HEX_BYTES], struct shd_err *e);

#endif
