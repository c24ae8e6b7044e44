/* Names in a directory, and lock files that say whether who made something lives. */
#ifndef SHD_DIR_H
#define SHD_DIR_H

#include <dirent.h>

/* The next name in a directory; NULL behind the last, where *dir is closed and NULL. NULL for NULL.
 */
const char *dir_next(DIR **dir);

/* A file that a live process locks by flock(). GONE: there is none. CLOSED: we cannot open it. */
enum lock_state { LOCK_GONE, LOCK_CLOSED, LOCK_FREE, LOCK_HELD };
enum lock_state lock_look(const char *dir, const char *file);

#endif
