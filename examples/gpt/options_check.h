/* options_check.h: what the options mean together. */
#ifndef GPT_OPTIONS_CHECK_H
#define GPT_OPTIONS_CHECK_H

#include "examples/gpt/options.h"

/* Fills o->chosen. Each combination that makes no sense is refused with the reason and what would
 * be right. Part of options_parse(). */
int options_check(struct options *o, struct shd_err *e);

#endif
