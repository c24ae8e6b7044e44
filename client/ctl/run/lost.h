/* What goes when daemons end: their models, as far as those are in no checkpoint. */
#ifndef SHD_CTL_LOST_H
#define SHD_CTL_LOST_H

#include <stdbool.h>

/* Ask the daemons at address ("DIR" or "DIR?cpu0,cpu1") and say a line behind `what` for each model
 * that has steps since its last checkpoint: steps, bytes, that checkpoint's age; and for each
 * daemon that does not answer. Waits for them, some seconds at most. False: nothing goes. */
bool lost_say(const char *address, const char *what);

#endif
