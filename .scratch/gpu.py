import torch, torch.nn.functional as F
import shardwise as sw
from shardwise import *
print(torch.__version__)
a=torch.ops.aten
seen=[]
orig=sw.DTensor.__torch_dispatch__
def td(cls,func,types,args=(),kwargs=None):
    seen.append(str(func)); return orig(func,types,args,kwargs)
sw.DTensor.__torch_dispatch__=classmethod(td)
m=sw.init_mesh(a=2,device="cuda")
torch.manual_seed(0)
for dt in (torch.float32,torch.bfloat16):
    x=torch.randn(6,8,16,device="cuda",dtype=dt); w=torch.rand(16,device="cuda",dtype=dt)
    for name,f in dict(rms=lambda x,w:F.rms_norm(x,(16,),w),ln=lambda x,w:F.layer_norm(x,(16,),w,w),gn=lambda x,w:F.group_norm(x.transpose(1,2),4,w,w),sm=lambda x,w:(x*w).softmax(-1),var=lambda x,w:(x*w).var(0)).items():
        X,W=x.clone().requires_grad_(),w.clone().requires_grad_()
        y=f(X,W); g=torch.randn_like(y); y.backward(g)
        for p in ([Shard(0)],[Shard(1)],[Shard(2)],[Replicate()],[Partial()]):
            del seen[:]
            X2,W2=[sw.distribute_tensor(t,m,q).requires_grad_() for t,q in ((x,p),(w,[Replicate()]))]
            try:
                y2=f(X2,W2); y2.backward(sw.distribute_tensor(g,m,[Replicate()]))
                tol=dict(atol=1e-4,rtol=1e-4) if dt==torch.float32 else dict(atol=.13,rtol=.05)
                for u,v in ((y2,y),(X2.grad,X.grad),(W2.grad,W.grad)): torch.testing.assert_close(u.full_tensor(),v,**tol)
                print(name,dt,p,'ok',[s for s in seen if 'norm' in s])
            except Exception as e: print(name,dt,p,'FAIL',repr(e)[:300])
    for n,args in (('native_layer_norm',(x,[16],w,w,1e-5)),('_fused_rms_norm',(x,[16],w,1e-5)),('native_group_norm',(x.transpose(1,2).contiguous(),w,w,6,16,8,4,1e-5))):
        real=[t.dtype for t in getattr(a,n)(*args)]
        got=getattr(a,n)(*[sw.distribute_tensor(t,m,[Replicate()]) if isinstance(t,torch.Tensor) else t for t in args])
        print(n,real,[t.dtype for t in got],[t.to_local().dtype for t in got])
    z=torch.tensor([[3.,5],[5,1],[5,5]],device="cuda",dtype=dt); d=sw.distribute_tensor(z,m,[Shard(0)])
    print(torch.equal(d.argmax(0).full_tensor(),z.argmax(0)),torch.equal(d.max(0)[1].full_tensor(),z.max(0)[1]),torch.equal(d.cumsum(0).full_tensor(),z.cumsum(0)))
