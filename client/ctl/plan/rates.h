/* The rates of a machine (client/plan/plan_time.h) in a file, as `shardctl plan --calibrate` writes
 * and `shardctl plan` reads it: --rates FILE, else shardd/rates.json in $XDG_CACHE_HOME
 * (~/.cache).
 *
 * Rates hold for the processor and the version that they were measured with. A file of others is
 * refused. The JSON's schema: docs/schedules.md. */
#ifndef SHD_CTL_PLAN_RATES_H
#define SHD_CTL_PLAN_RATES_H

#include <stdbool.h>
#include <stddef.h>

#include "client/plan/plan_time.h"
#include "proto/base/status.h"

#define RATES_PATH_BYTES 4096u
#define RATES_DATE_BYTES 24u

/* given: --rates, or NULL. Errors: SHD_ENOENT there is no home directory; SHD_ERANGE. */
int rates_path(const char *given, char path[RATES_PATH_BYTES], struct shd_err *e);

/* ret_date: the day they were measured. Errors: SHD_ENOENT no such file; SHD_EINVAL it is none, or
 * of another processor or version: the text says which. */
int rates_load(const char *path, struct plan_rates *ret_rates, char ret_date[RATES_DATE_BYTES],
               struct shd_err *e);

/* Directories that are missing are made, a file that is there is replaced. Errors: SHD_EIO. */
int rates_save(const char *path, const struct plan_rates *rates, struct shd_err *e);

#endif
