/* backend_host.h: the model of model.h as a backend. */
#ifndef GPT_BACKEND_HOST_H
#define GPT_BACKEND_HOST_H

#include "examples/gpt/backend.h"

/* Errors: SHD_ENOMEM; SHD_ERANGE limits. */
int backend_host_new(const struct backend_config *config, struct backend **ret_backend,
                     struct shd_err *e);

#endif
