/* data.h: the training text, its held-out part, and the windows cut from it.
 *
 * All files are read into memory, one behind the other. The text is divided into sections of
 * equal size (at most DATA_SECTIONS_MAX; up to that many bytes at the end stay unused), and the
 * last 5 % of each section is held out: so the held-out text has the same mix of files as the
 * training text, and no window crosses the border.
 */
#ifndef GPT_DATA_H
#define GPT_DATA_H

#include <stdint.h>

#include "client/shd.h"

#define DATA_DEFAULT_PATH "/usr/share/games/fortunes"
#define DATA_SECTIONS_MAX 64
#define DATA_HELD_OUT_DIV 20 /* one part of 20 */

struct data;

/* Read files and folders. Folders are walked recursively, entries sorted by name (bytes); what is
 * no regular file, symlinks, and files with a NUL byte are skipped there. A file named directly
 * must be text. seq is the window length less one.
 * Errors: SHD_ENOENT missing; SHD_EIO unreadable; SHD_EINVAL not text; SHD_ERANGE too short,
 * naming the bytes present and needed; SHD_ENOMEM. */
int data_load(const char *const *paths, uint32_t count, uint32_t seq, struct data **ret_data,
              struct shd_err *e);
void data_free(struct data *d);

uint64_t data_bytes(const struct data *d);
uint32_t data_files(const struct data *d);

/* Bytes data_load() needs for a seq. */
uint64_t data_bytes_needed(uint32_t seq);

/* Which batch. */
struct data_key {
    uint64_t seed, step;
    uint32_t micro;
};

/* Training windows [rows, seq + 1]: a pure function of the text and the key. */
void data_batch(const struct data *d, struct data_key key, uint32_t rows, uint8_t *ret_windows);

/* Held-out windows do not overlap and come in a fixed order, spread over the sections. */
uint64_t data_held_out_windows(const struct data *d);
/* Windows first .. first + rows - 1, [rows, seq + 1]; indices wrap around. */
void data_held_out(const struct data *d, uint64_t first, uint32_t rows, uint8_t *ret_windows);

#endif
